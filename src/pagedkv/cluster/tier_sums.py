"""The numbers of tiers of several replicas, added up by the name of the tier."""

from collections.abc import Iterable
from dataclasses import replace

from pagedkv.engine import TierStatistics
from pagedkv.tiers import BreakerState

__all__ = ["sums_by_tier"]


def sums_by_tier(tiers: Iterable[TierStatistics]) -> tuple[TierStatistics, ...]:
    """Return one value for each name: entries, bytes, loads and tokens are added up.

    The breaker is open if that of some replica is. Other numbers of the store are those of the first replica.
    """
    sums: dict[str, TierStatistics] = {}
    for tier in tiers:
        before = sums.get(tier.name)
        sums[tier.name] = tier if before is None else _sum(before, tier)
    return tuple(sums.values())


def _sum(one: TierStatistics, other: TierStatistics) -> TierStatistics:
    is_open = BreakerState.OPEN in {one.store.breaker, other.store.breaker}
    causes = one.not_loaded.keys() | other.not_loaded.keys()
    return replace(
        one,
        num_loads=one.num_loads + other.num_loads,
        num_loaded_tokens=one.num_loaded_tokens + other.num_loaded_tokens,
        num_hit_tokens=one.num_hit_tokens + other.num_hit_tokens,
        not_loaded={cause: one.not_loaded.get(cause, 0) + other.not_loaded.get(cause, 0) for cause in causes},
        num_offered_runs=one.num_offered_runs + other.num_offered_runs,
        store=replace(
            one.store,
            num_entries=one.store.num_entries + other.store.num_entries,
            nbytes=one.store.nbytes + other.store.nbytes,
            breaker=BreakerState.OPEN if is_open else one.store.breaker,
        ),
    )
