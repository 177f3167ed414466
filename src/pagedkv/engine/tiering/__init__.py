"""Tiers of an engine: its blocks in host memory, on disk, in Redis and in object stores, and back.

::

    identity       what the content is: layout, weights, code, versions
    block_bytes    bytes of blocks, from the device and to it, and host memory of tiers
    content        StoredContent: both, for an engine in one process; another one is for several ranks
    open_tier      a tier as its user wrote it, and its store
    engine_tiers   EngineTiers: what the loop calls
    hand_off       where a prompt lies in shared tiers, or in memory, for another engine
    nixl_link      moves a prompt from memory to memory
    prefix_file    a prefix as a file, without any tier

Stores, and what is loaded and offered, are :mod:`pagedkv.tiers`, which is independent of engines. ``docs/tiers.md`` has
the rules.
"""

from pagedkv.engine.tiering.block_bytes import block_bytes_with_staging, open_tier_memory
from pagedkv.engine.tiering.content import OwnContent, StoredContent, scales_of
from pagedkv.engine.tiering.engine_tiers import EngineTiers
from pagedkv.engine.tiering.hand_off import HandOff, hand_over_direct, take_over_direct
from pagedkv.engine.tiering.identity import identity_of, model_digest
from pagedkv.engine.tiering.nixl_link import NixlLink
from pagedkv.engine.tiering.prefix_file import read_prefix, write_prefix
from pagedkv.tiers.served import LoadUnderWay, TierCause, TierNote, TierStatistics

__all__ = [
    "EngineTiers",
    "HandOff",
    "LoadUnderWay",
    "NixlLink",
    "OwnContent",
    "StoredContent",
    "TierCause",
    "TierNote",
    "TierStatistics",
    "block_bytes_with_staging",
    "hand_over_direct",
    "identity_of",
    "model_digest",
    "open_tier_memory",
    "read_prefix",
    "scales_of",
    "take_over_direct",
    "write_prefix",
]
