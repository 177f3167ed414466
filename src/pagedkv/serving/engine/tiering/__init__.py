"""Tiers of an engine: its blocks in host memory, on disk, in Redis and in object stores, and back.

::

    identity       what the content is: layout, weights, versions
    entry_layout   which blocks an entry of a store holds; ends: where a cached prefix can end as one
    block_bytes    their bytes, from the device and to it; gpu_block_bytes: of a GPU
    tier_memory    host memory of tiers
    rates          how fast computing is
    tier_reports   what became of it: TierNote, TierStatistics
    open_tier      a tier, its store and its counts
    tier_offers    what is computed is copied out and offered
    tier_loads     prefixes are loaded before requests are admitted
    engine_tiers   EngineTiers: what the loop calls
    prefix_file    a prefix as a file, without any tier

The store is :mod:`pagedkv.memory.tiers`, and knows none of this. ``docs/tiers.md`` has the rules.
"""

from pagedkv.serving.engine.tiering.engine_tiers import EngineTiers
from pagedkv.serving.engine.tiering.prefix_file import read_prefix, write_prefix
from pagedkv.serving.engine.tiering.tier_reports import TierCause, TierNote, TierStatistics

__all__ = ["EngineTiers", "TierCause", "TierNote", "TierStatistics", "read_prefix", "write_prefix"]
