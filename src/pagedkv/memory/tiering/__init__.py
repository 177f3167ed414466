"""What a serving loop does with tiers: which entries it loads and offers, and when.

An engine and a simulation share it.

::

    entry_layout   which blocks an entry of a store holds; ends: where a cached prefix can end as one
    block_bytes    copies of blocks to the host and back, as an engine offers them
    rates          how fast computing is
    tier_reports   what became of it: TierNote, TierStatistics
    served_tier    a tier, its store and its counts
    tier_offers    what is computed is copied out and offered
    tier_loads     prefixes are loaded before requests are admitted

Stores are :mod:`pagedkv.memory.tiers`. This room has no thread, no clock and no torch: its caller carries out what it
begins. ``docs/tiers.md`` has the rules.
"""

from pagedkv.memory.tiering.block_bytes import BlockBytes, CopyEnd, HostBlocks, Rows, fill
from pagedkv.memory.tiering.ends import longest_end
from pagedkv.memory.tiering.entry_layout import EntryLayout
from pagedkv.memory.tiering.rates import ComputeRate
from pagedkv.memory.tiering.request_loads import RequestLoads
from pagedkv.memory.tiering.served_tier import RunStore, ServedTier
from pagedkv.memory.tiering.tier_loads import TierLoads
from pagedkv.memory.tiering.tier_offers import TierOffers
from pagedkv.memory.tiering.tier_reports import LoadUnderWay, TierCause, TierNote, TierStatistics

__all__ = [
    "BlockBytes",
    "ComputeRate",
    "CopyEnd",
    "EntryLayout",
    "HostBlocks",
    "LoadUnderWay",
    "RequestLoads",
    "Rows",
    "RunStore",
    "ServedTier",
    "TierCause",
    "TierLoads",
    "TierNote",
    "TierOffers",
    "TierStatistics",
    "fill",
    "longest_end",
]
