"""A server that breaks one rule is found out: each fault must change a figure that the comparison compares.

The faults are put into the naive server, whose rules stand one by one; the scenes are small enough to see why.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from pagedkv.replay.cost import CostModel
from pagedkv.replay.request import TokenizedRequest
from tests.replay.serving.naive_server import NaiveConfig, NaiveJob, NaiveServer
from tests.replay.serving.naive_space import NaiveSpace, NaiveTable
from tests.replay.serving.traffic import assert_same, request_of, serve

Scene: TypeAlias = tuple[list[TokenizedRequest], NaiveConfig]

COST = CostModel(fixed_s=1.0, token_compute_s=0.125)


class NoWatermark(NaiveSpace):
    """Admits up to the last block."""

    @property
    def kept_free(self) -> int:
        """Keep nothing."""
        return 0


class EvictsNewest(NaiveSpace):
    """Takes the cached block that was used last."""

    def _next_free(self) -> int:
        return self.free.pop(0 if self.num_empty else -1)


class HitsLastToken(NaiveSpace):
    """Lets a whole prompt hit."""

    def _most_hit_tokens(self, tokens: list[Any]) -> int:
        return len(tokens)

    def allocate(self, tokens: list[Any]) -> NaiveTable:
        """Compute one token all the same, or it would never end."""
        table = super().allocate(tokens)
        table.num_computed = min(table.num_computed, len(tokens) - 1)
        return table


class NeverCopiesOnWrite(NaiveSpace):
    """Writes into shared blocks."""

    def append(self, growing: list[tuple[NaiveTable, list[Any]]]) -> None:
        """Append as if nobody shared."""
        references, self.references = self.references, self.references.copy()
        for table, _ in growing:
            self.references[table.blocks[-1]] = 1
        super().append(growing)
        for block, count in references.items():
            self.references[block] = max(count, self.references[block])

    def num_needed(self, growing: list[tuple[NaiveTable, list[Any]]]) -> int:
        """Count no copies."""
        return sum(self.blocks_for(len(table.tokens) + len(new)) - len(table.blocks) for table, new in growing)


class NeverMerges(NaiveSpace):
    """Keeps two blocks of equal content."""

    def _merge(self, duplicate: object) -> None:
        pass


class PreemptsSmallestKey(NaiveServer):
    """Preempts who came first."""

    def _victim(self) -> NaiveJob:
        return min(self.running, key=lambda job: job.key)


class ReservesLastToken(NaiveServer):
    """Counts the last generated token as if it were appended."""

    def _arrive(self, job: NaiveJob) -> None:
        b = self.config.block_size
        if -(-(job.final_length + 1) // b) > self.space.num_usable:
            self.measures.counts["num_rejected"] += 1
        else:
            super()._arrive(job)


class ForgetsBudget(NaiveServer):
    """Lets prompts compute beyond the budget."""

    def _prefill(self, budget: int) -> int:
        super()._prefill(budget)
        return budget


def with_space(space: type[NaiveSpace]) -> type[NaiveServer]:
    """Make a server that is right but for its space."""

    class Server(NaiveServer):
        def new_space(self, num_usable: int, block_size: int, num_host_usable: int, watermark: float) -> NaiveSpace:
            return space(num_usable, block_size, num_host_usable, watermark)

    return Server


def two_that_collide() -> Scene:
    requests = [request_of([1, 2, 3], range(50, 54)), request_of([6, 7, 8], range(60, 66))]
    return requests, NaiveConfig(5, 2, watermark=0.0)


def one_after_another() -> Scene:
    requests = [request_of([1, 2, 3]), request_of([8, 9, 10], [], 7.0), request_of([1, 2, 3], [], 20.0)]
    return requests, NaiveConfig(5, 1, watermark=0.0)


def twice_the_same() -> Scene:
    return [request_of([1, 2, 3, 4], [5, 6]), request_of([1, 2, 3, 4], [5, 6], 0.5)], NaiveConfig(20, 2)


def room_but_for_the_watermark() -> Scene:
    return [request_of([1, 2, 3], [5, 6]), request_of([7, 8, 9], [5, 6])], NaiveConfig(8, 1, watermark=0.3)


def three_samples() -> Scene:
    return [request_of([1, 2, 3], range(50, 60), num_samples=3)], NaiveConfig(40, 4)


def exactly_full() -> Scene:
    return [request_of([1, 2], [3, 4, 5])], NaiveConfig(3, 2)


def two_chunks() -> Scene:
    requests = [request_of(range(7), [50]), request_of(range(20, 23), [50], 0.5)]
    return requests, NaiveConfig(40, 2, max_sequences=4, max_batched_tokens=4)


CONTROLS: list[tuple[type[NaiveServer], Callable[[], Scene]]] = [
    (with_space(NoWatermark), room_but_for_the_watermark),
    (with_space(EvictsNewest), one_after_another),
    (with_space(HitsLastToken), twice_the_same),
    (with_space(NeverCopiesOnWrite), three_samples),
    (with_space(NeverMerges), twice_the_same),
    (PreemptsSmallestKey, two_that_collide),
    (ReservesLastToken, exactly_full),
    (ForgetsBudget, two_chunks),
]
NAMES = [
    "ignores the watermark",
    "evicts the most recently used",
    "hits the last token",
    "forgets copy on write",
    "keeps duplicates",
    "preempts the smallest key",
    "counts the last generated token",
    "forgets the budget",
]


@pytest.mark.parametrize(("faulty", "scene"), CONTROLS, ids=NAMES)
def test_a_broken_rule_is_noticed(faulty: type[NaiveServer], scene: Callable[[], Scene]) -> None:
    requests, config = scene()
    report = serve(requests, config, COST)
    assert_same(report, NaiveServer(config, COST).run(requests))
    with pytest.raises(AssertionError):
        assert_same(report, faulty(config, COST).run(requests))
