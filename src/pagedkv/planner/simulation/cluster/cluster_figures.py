"""ClusterFigures: what a run of a cluster came to."""

import math
from dataclasses import dataclass

import numpy as np

from pagedkv.memory.contract.arrays import Float64Array

__all__ = ["ClusterFigures"]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterFigures:
    """What a run of a cluster came to.

    Args:
        num_requests: requests that arrived; num_prompt_tokens: of them all; num_hit_tokens: those that were hits when
            the request was admitted for the first time.
        first_token_s: seconds from arrival to the first token of each request: float64 ``[requests]``, NaN without one.
        computed_tokens: tokens computed by each replica in each whole minute until the last arrival, else in the first:
            float64 ``[replicas, minutes]``.
        busy: fraction of the time until the last arrival that replicas computed, their mean.
        num_by_reason: decisions by reason.
        num_lost_batches: batches of events that were lost; num_snapshots: snapshots that were taken for it.
        num_kills: replicas that died; num_moves: requests that were routed again; num_failed: requests that ended with
            an error, since no replica was there.
    """

    num_requests: int
    num_prompt_tokens: int
    num_hit_tokens: int
    first_token_s: Float64Array
    computed_tokens: Float64Array
    busy: float
    num_by_reason: dict[str, int]
    num_lost_batches: int
    num_snapshots: int
    num_kills: int = 0
    num_moves: int = 0
    num_failed: int = 0

    @property
    def hit_ratio(self) -> float:
        """Fraction of the prompts' tokens that were hits."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def imbalance(self) -> float:
        """Largest over mean of the tokens that replicas computed in a minute, in the mean of all computed tokens.

        So a minute counts as much as it has work. In a minute with next to none a few requests are out of balance.
        """
        largest, mean = self.computed_tokens.max(axis=0).sum(), self.computed_tokens.mean(axis=0).sum()
        return float(largest / mean) if mean else 1.0

    @property
    def imbalance_of_minutes(self) -> float:
        """The same in the mean of all minutes with work, however little of it."""
        minutes = self.computed_tokens[:, self.computed_tokens.any(axis=0)]
        return float((minutes.max(axis=0) / minutes.mean(axis=0)).mean()) if minutes.size else 1.0

    def first_token_percentile_s(self, percent: float) -> float:
        """Return the seconds within which so many percent of the first tokens came."""
        came = self.first_token_s[~np.isnan(self.first_token_s)]
        return float(np.percentile(came, percent)) if len(came) else math.nan
