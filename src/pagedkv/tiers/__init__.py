"""Tiers: stores of cached content below device memory, which never answer wrongly.

Reading order: ``identity`` (what content is), ``checksums`` and ``frame`` (how it is written, read and refused). Then
the decisions of a store, without thread, clock and I/O: ``config``, ``actions``, ``keys`` (the words), ``deadlines``,
``breaker``, ``index``, ``room``, ``event_log``, ``admission``, ``statistics`` (the parts), ``deletes`` and ``entries``
(what is there), ``reads``, ``offers`` and ``writes`` (what is under way), ``dispatch`` (what is sent), and ``core``,
which wires them. Then ``host_memory``, ``body`` and the bodies ``host_body``, ``folder_body``, ``redis_body`` and
``object_body`` (where bytes are kept), ``store`` (a core and a body on threads), and ``shared_store`` (entries of other
processes). Last what an engine takes: ``specs`` (tiers as users write them) and ``chain`` (the entries of a sequence).
This room depends on no device, no model and no engine.
"""

from pagedkv.tiers.actions import Action, Delete, Loaded, LoadEnd, Read, StoreEvents, StoreOutcome, Write
from pagedkv.tiers.body import Body
from pagedkv.tiers.breaker import BreakerState
from pagedkv.tiers.chain import RunChain, end_key_of
from pagedkv.tiers.checksums import compute_check
from pagedkv.tiers.config import StoreConfig
from pagedkv.tiers.core import StoreCore
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import (
    OpenFrame,
    Refusal,
    RefusalReason,
    frame_nbytes,
    frames_of,
    open_frame,
    read_frames,
    write_frame,
)
from pagedkv.tiers.host_body import HostBody
from pagedkv.tiers.host_memory import HostMemory
from pagedkv.tiers.identity import GroupLayout, Identity, ModelIdentity, Run, runs_of
from pagedkv.tiers.keys import KEY_NBYTES, array_of
from pagedkv.tiers.load import Load, LoadedRuns
from pagedkv.tiers.object_body import ObjectBody
from pagedkv.tiers.redis_body import RedisBody
from pagedkv.tiers.shared_store import SharedStore
from pagedkv.tiers.specs import (
    Admission,
    BodyTier,
    FolderTier,
    HostTier,
    LoadRule,
    ObjectTier,
    RedisTier,
    Tier,
    parse_nbytes,
    parse_tier,
)
from pagedkv.tiers.statistics import StoreStatistics
from pagedkv.tiers.store import TierStore

__all__ = [
    "KEY_NBYTES",
    "Action",
    "Admission",
    "Body",
    "BodyTier",
    "BreakerState",
    "Delete",
    "FolderBody",
    "FolderTier",
    "GroupLayout",
    "HostBody",
    "HostMemory",
    "HostTier",
    "Identity",
    "Load",
    "LoadEnd",
    "LoadRule",
    "Loaded",
    "LoadedRuns",
    "ModelIdentity",
    "ObjectBody",
    "ObjectTier",
    "OpenFrame",
    "Read",
    "RedisBody",
    "RedisTier",
    "Refusal",
    "RefusalReason",
    "Run",
    "RunChain",
    "SharedStore",
    "StoreConfig",
    "StoreCore",
    "StoreEvents",
    "StoreOutcome",
    "StoreStatistics",
    "Tier",
    "TierStore",
    "Write",
    "array_of",
    "compute_check",
    "end_key_of",
    "frame_nbytes",
    "frames_of",
    "open_frame",
    "parse_nbytes",
    "parse_tier",
    "read_frames",
    "runs_of",
    "write_frame",
]
