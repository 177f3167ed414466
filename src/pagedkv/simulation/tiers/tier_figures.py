"""The figures of a simulation's tiers, for JSON."""

from typing import Any

from pagedkv.simulation.tiers.simulated_tiers import SimulatedTiers
from pagedkv.tiers import StoreOutcome
from pagedkv.tiers.served import ServedTier, TierCause

__all__ = ["tier_figures"]

DEVICE = "device"


def tier_figures(tiers: SimulatedTiers, num_hit_tokens: int, num_prompt_tokens: int) -> dict[str, Any]:
    """Sum up the counts of all tiers.

    Args:
        tiers: the tiers.
        num_hit_tokens: hit tokens of all first admissions, including those that tiers loaded.
        num_prompt_tokens: prompt tokens of these admissions.

    Returns:
        ``hits``: by medium, hit tokens of first admissions and their share of the prompt tokens. A tier's are those
        that were loaded from it for the request, the device's all others. ``media``: each tier's counts.
    """
    loaded = tiers.num_hit_tokens
    by_medium = {DEVICE: num_hit_tokens - sum(loaded.values()), **loaded}
    return {
        "hits": {
            medium: {"num_tokens": count, "share": count / num_prompt_tokens if num_prompt_tokens else 0.0}
            for medium, count in by_medium.items()
        },
        "media": {tier.medium: _counts(tier) for tier in tiers.tiers},
    }


def _counts(tier: ServedTier) -> dict[str, Any]:
    store = tier.store.statistics()
    return {
        "num_loads": tier.num_loads,
        "num_loaded_tokens": tier.num_loaded_tokens,
        "mean_load_s": tier.loaded_s / tier.num_loads_that_came if tier.num_loads_that_came else None,
        "num_computed_instead": tier.num_refused_loads,
        "num_tokens_computed_instead": tier.not_loaded[TierCause.FASTER],
        "not_loaded": {str(cause): count for cause, count in sorted(tier.not_loaded.items()) if count},
        "read_nbytes": store.read_nbytes,
        "written_nbytes": store.written_nbytes,
        "num_stored": store.offers.get(StoreOutcome.STORED, 0),
        "num_evicted": store.num_evicted,
        "num_entries": store.num_entries,
        "nbytes": store.nbytes,
    }
