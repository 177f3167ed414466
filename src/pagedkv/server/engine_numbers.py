"""EngineNumbers: numbers of the engine at one moment, for metrics."""

from dataclasses import dataclass
from typing import Self

from pagedkv.engine import LLM, TierStatistics

__all__ = ["EngineNumbers"]


@dataclass(frozen=True, slots=True)
class EngineNumbers:
    """Numbers of an engine between two steps.

    Args:
        num_running: running requests.
        num_waiting: waiting requests.
        num_live: blocks that running sequences use.
        num_blocks: all blocks except the null blocks.
        num_leased: free blocks that leases keep cached.
        num_evictions: cached blocks evicted since the engine was built.
        tiers: statistics of each tier below the device.
    """

    num_running: int
    num_waiting: int
    num_live: int
    num_blocks: int
    num_leased: int
    num_evictions: int
    tiers: tuple[TierStatistics, ...]

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Read the numbers from an engine. O(rows + blocks in tables)."""
        core = llm.core
        pools = core.space.config.blocks_by_pool()
        statistics = core.space.statistics()
        return cls(
            len(core.scheduler.running),
            core.scheduler.num_waiting,
            core.space.num_live_blocks(),
            sum(pools.values()) - len(pools),
            sum(pool.num_leased for pool in statistics.pools),
            sum(pool.num_evictions for pool in statistics.pools),
            llm.tier_statistics(),
        )
