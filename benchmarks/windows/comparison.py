"""One workload from one seed, served in all ways; and the outcomes of all seeds together.

A point is a workload at a capacity, with one pool or two. The bar: ahead of the peer's rule in the mean and on four of
five seeds, or within 0.01 of an endless pool in the mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import mean
from typing import Final

from benchmarks.windows.endless import endless_hits
from benchmarks.windows.ours import our_hits
from benchmarks.windows.peer import Ends, peer_hits
from benchmarks.windows.workloads import WORKLOADS

__all__ = ["CAPACITIES", "Outcome", "Point", "measure", "points"]

CAPACITIES: Final = (1_500, 3_000, 6_000)
"""Blocks, null blocks included."""
LEAST_AHEAD: Final = 0.8
NEAR: Final = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hit ratios, by tokens of prompts, of one workload from one seed.

    Args:
        workload: its name; seed: that it was drawn from; num_pools: one, or one for the windows as well.
        num_blocks: the capacity, of all pools together.
        ours: of this package; peer: by the peer's rule as documented.
        peer_prompts: by the same rule where nothing of an answer is kept; endless: in a pool that never evicts.
    """

    workload: str
    seed: int
    num_pools: int
    num_blocks: int
    ours: float
    peer: float
    peer_prompts: float
    endless: float


@dataclass(frozen=True, slots=True)
class Point:
    """All seeds of a workload at one capacity."""

    workload: str
    num_pools: int
    num_blocks: int
    outcomes: tuple[Outcome, ...]

    def mean(self, name: str) -> float:
        """Average a ratio, by its name in :class:`Outcome`."""
        return float(mean(getattr(outcome, name) for outcome in self.outcomes))

    @property
    def num_ahead(self) -> int:
        """Count the seeds on which we are above the peer."""
        return sum(outcome.ours > outcome.peer for outcome in self.outcomes)

    @property
    def is_met(self) -> bool:
        """Return whether this package meets the bar."""
        is_often_ahead = self.num_ahead >= LEAST_AHEAD * len(self.outcomes)
        is_ahead = is_often_ahead and self.mean("ours") > self.mean("peer")
        return is_ahead or self.mean("ours") >= self.mean("endless") - NEAR


def measure(workload: str, seed: int) -> list[Outcome]:
    """Serve one workload with one pool and with two, at each capacity."""
    requests = list(WORKLOADS[workload](seed))
    num_tokens = sum(len(request.prompt) for request in requests)
    endless = endless_hits(requests)

    def ratio(hits: list[int]) -> float:
        assert all(hit <= most for hit, most in zip(hits, endless, strict=True)), "a hit that was never computed"
        return sum(hits) / num_tokens

    return [
        Outcome(
            workload,
            seed,
            1 + separate,
            num_blocks,
            ours=ratio(our_hits(requests, num_blocks, separate=separate)),
            peer=ratio(peer_hits(requests, num_blocks, separate=separate)),
            peer_prompts=ratio(peer_hits(requests, num_blocks, separate=separate, ends=Ends.PROMPT)),
            endless=ratio(endless),
        )
        for separate in (False, True)
        for num_blocks in CAPACITIES
    ]


def points(outcomes: Iterable[Outcome]) -> list[Point]:
    """Gather outcomes by workload, number of pools and capacity."""

    def point_of(outcome: Outcome) -> tuple[str, int, int]:
        return outcome.workload, outcome.num_pools, outcome.num_blocks

    ordered = sorted(outcomes, key=point_of)
    return [Point(*point, tuple(seeds)) for point, seeds in groupby(ordered, key=point_of)]
