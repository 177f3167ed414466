"""ClusterFigures: the results of a run of a cluster."""

import math
from dataclasses import dataclass

import numpy as np

from pagedkv.contract.arrays import Float64Array

__all__ = ["ClusterFigures"]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterFigures:
    """The results of a run of a cluster.

    Args:
        num_requests: requests that arrived; num_prompt_tokens: of them all; num_hit_tokens: those that were hits when
            the request was admitted for the first time.
        first_token_s: seconds from arrival to the first token of each request: float64 ``[requests]``, NaN without one.
        computed_tokens: tokens computed by each replica in each whole minute until the last arrival, else in the first;
            minutes without a step are left out: float64 ``[replicas, minutes]``.
        busy: fraction of the time until the last arrival in which a step ran, the mean of all replicas.
        num_by_reason: routing decisions by reason.
        num_lost_batches: batches of events that were lost; num_snapshots: snapshots that were sent instead.
        num_kills: replicas that were killed; num_moves: requests that were routed again; num_failed: requests that
            ended with an error, since there was no replica.
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
        """The largest number of tokens that a replica computed in a minute, over the mean of all replicas.

        Both are summed over the minutes, so a minute counts in proportion to its tokens. A minute with few requests can
        hardly be balanced, and counts little.
        """
        largest, mean = self.computed_tokens.max(axis=0).sum(), self.computed_tokens.mean(axis=0).sum()
        return float(largest / mean) if mean else 1.0

    @property
    def imbalance_of_minutes(self) -> float:
        """The mean of this ratio over all minutes with computed tokens, each counted alike."""
        minutes = self.computed_tokens[:, self.computed_tokens.any(axis=0)]
        return float((minutes.max(axis=0) / minutes.mean(axis=0)).mean()) if minutes.size else 1.0

    def first_token_percentile_s(self, percent: float) -> float:
        """Return a percentile of the times to the first token, in seconds; NaN without any."""
        known_s = self.first_token_s[~np.isnan(self.first_token_s)]
        return float(np.percentile(known_s, percent)) if len(known_s) else math.nan
