"""Tiering: loads prefixes from tiers and offers computed content to them, for the serving loop of an engine.

An engine and a simulation share it.

::

    entry_layout   the blocks of an entry of a store; ends: the places at which a cached prefix can end as an entry
    block_bytes    copies of blocks to the host and back, as a protocol
    rates          the speed of computing tokens
    tier_reports   TierNote, LoadUnderWay, TierStatistics
    served_tier    a tier, its store and its counts
    tier_offers    copies computed content to the host, and offers it
    tier_loads     loads prefixes before requests are admitted

Stores are :mod:`pagedkv.tiers`. This room has no thread, no clock and no torch: its caller carries out the
copies. ``docs/tiers.md`` has the rules.
"""

from pagedkv.tiering.block_bytes import BlockBytes, CopyEnd, HostBlocks, Rows, fill
from pagedkv.tiering.ends import longest_end
from pagedkv.tiering.entry_layout import EntryLayout
from pagedkv.tiering.rates import ComputeRate
from pagedkv.tiering.request_loads import RequestLoads
from pagedkv.tiering.served_tier import RunStore, ServedTier
from pagedkv.tiering.tier_events import MOST_TIER_EVENTS, TierEventLog, published_medium
from pagedkv.tiering.tier_loads import TierLoads
from pagedkv.tiering.tier_offers import TierOffers
from pagedkv.tiering.tier_reports import LoadUnderWay, TierCause, TierNote, TierStatistics

__all__ = [
    "MOST_TIER_EVENTS",
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
    "TierEventLog",
    "TierLoads",
    "TierNote",
    "TierOffers",
    "TierStatistics",
    "fill",
    "longest_end",
    "published_medium",
]
