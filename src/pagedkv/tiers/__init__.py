"""Tiers: stores of cached content below device memory, which never answer wrongly, and what is loaded and offered.

Reading order::

    identity, frame    what content is, and how it is written, read and refused
    words, timing      keys, settings, actions, answers; deadlines and the circuit breaker
    index, entries     what is there, from the room for a write to the end of a delete
    offers, writes, reads, core   decisions about what is under way, without thread, clock and I/O
    body, folder_body, redis_body, object_body   where bytes are kept
    store, shared_store   a core and a body on threads; entries of other processes
    codecs             how frames are written: compressed, encrypted, in eight bits
    specs              tiers as users write them
    checkpoint         the digest of a model's files, for engines that tell their path alone
    entry_blocks, served, tier_loads, tier_offers, tier_events   what an engine, or a simulation, loads and offers

This room depends on no device, no model and no engine. What is loaded and offered has no thread and no clock: its
caller carries out the copies. ``docs/tiers.md`` has the rules. The names below are of stores, which need no block
space; an engine imports the last five modules by themselves.
"""

from pagedkv.tiers.body import Body, HostBody, HostMemory
from pagedkv.tiers.checkpoint import checkpoint_digest, digest_of_weights
from pagedkv.tiers.codecs import AesGcm, Codec, Fp8, Zstd, parse_codec
from pagedkv.tiers.core import StoreCore, StoreStatistics
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import (
    OpenFrame,
    Refusal,
    RefusalReason,
    compute_check,
    frame_nbytes,
    frames_of,
    open_frame,
    read_frames,
    write_frame,
)
from pagedkv.tiers.identity import GroupLayout, Identity, ModelIdentity, Run, RunChain, end_key_of, runs_of
from pagedkv.tiers.index import StoreIndex
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
    tier_of_options,
)
from pagedkv.tiers.store import Load, LoadedRuns, TierStore
from pagedkv.tiers.timing import BreakerState
from pagedkv.tiers.words import (
    KEY_NBYTES,
    Action,
    Delete,
    Loaded,
    LoadEnd,
    Read,
    StoreConfig,
    StoreEvents,
    StoreOutcome,
    Write,
    array_of,
)

__all__ = [
    "KEY_NBYTES",
    "Action",
    "Admission",
    "AesGcm",
    "Body",
    "BodyTier",
    "BreakerState",
    "Codec",
    "Delete",
    "FolderBody",
    "FolderTier",
    "Fp8",
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
    "StoreIndex",
    "StoreOutcome",
    "StoreStatistics",
    "Tier",
    "TierStore",
    "Write",
    "Zstd",
    "array_of",
    "checkpoint_digest",
    "compute_check",
    "digest_of_weights",
    "end_key_of",
    "frame_nbytes",
    "frames_of",
    "open_frame",
    "parse_codec",
    "parse_nbytes",
    "parse_tier",
    "read_frames",
    "runs_of",
    "tier_of_options",
    "write_frame",
]
