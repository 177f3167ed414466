"""A server that breaks one rule is found out: each fault must change a figure that the comparison compares.

The faults are put into the naive server, whose rules stand one by one; the scenes are small enough to see why.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation.cost import CostModel
from tests.simulation.naive_pool import NaivePool
from tests.simulation.naive_server import NaiveConfig, NaiveJob, NaiveServer
from tests.simulation.naive_space import Duplicate, NaiveSpace, NaiveTable
from tests.simulation.traffic import assert_same, request_of, serve

Scene: TypeAlias = tuple[list[TokenizedRequest], NaiveConfig]

COST = CostModel(fixed_s=1.0, token_compute_s=0.125)


class NoWatermark(NaiveSpace):
    """Admits up to the last block."""

    @property
    def kept_free(self) -> int:
        """Keep nothing."""
        return 0


class NewestFirst(NaivePool):
    """Takes the cached block that was used last."""

    def _next_free(self) -> int:
        return self.free.pop(0 if self.num_empty else -1)


class EvictsNewest(NaiveSpace):
    """Evicts what was used last."""

    def new_pool(self, num_usable: int) -> NaivePool:
        """Make a pool that does."""
        return NewestFirst(num_usable)


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
        """Append as if no block were shared."""
        references, self.device.references = self.device.references, self.device.references.copy()
        for table, _ in growing:
            self.device.references[table.blocks[-1]] = 1
        super().append(growing)
        for block, count in references.items():
            self.device.references[block] = max(count, self.device.references[block])

    def num_needed(self, growing: list[tuple[NaiveTable, list[Any]]]) -> int:
        """Count no copies."""
        return sum(self.blocks_for(len(table.tokens) + len(new)) - len(table.blocks) for table, new in growing)


class NeverMerges(NaiveSpace):
    """Keeps two blocks of equal content."""

    def _merge(self, duplicate: object, orphans: object) -> None:
        pass


class ForgetsOrphans(NaiveSpace):
    """Names no duplicate whose carrier is gone."""

    def _merge(self, duplicate: Duplicate, _orphans: list[NaiveTable]) -> None:
        super()._merge(duplicate, [])


class CopiesTwins(NaiveSpace):
    """Swaps everything, whatever is there already."""

    def _twins(self, tables: list[NaiveTable], source: NaivePool, destination: NaivePool) -> dict[int, int | None]:
        return dict.fromkeys(super()._twins(tables, source, destination))


class NamesNothingOnHost(NaiveSpace):
    """Never finds on the host what was brought there."""

    def _name_on_host(self, table: NaiveTable) -> None:
        pass


class ReturnsWithoutRoom(NaiveSpace):
    """Lets sequences return that cannot take their next tokens."""

    def can_swap_in(self, tables: list[NaiveTable], _num_slots: int) -> bool:
        """Count what is copied, and no more."""
        return self.fits(self._num_taken(self._twins(tables, self.host, self.device), self.device))


class SwapsAnyNumber(NaiveServer):
    """Swaps more sequences out than may run."""

    def _preempt(self, job: NaiveJob) -> None:
        config = self.config
        self.config = replace(config, max_sequences=1000)
        super()._preempt(job)
        self.config = config


class PreemptsSmallestKey(NaiveServer):
    """Preempts who came first."""

    def _victim(self) -> NaiveJob:
        return min(self.running, key=lambda job: job.key)


class ReservesLastToken(NaiveServer):
    """Counts the last generated token as if it were appended."""

    def _arrive(self, job: NaiveJob) -> None:
        b = self.config.block_size
        if -(-(job.final_length + 1) // b) > self.space.device.num_usable:
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


def three_with_a_common_prefix() -> Scene:
    requests = [request_of([1, 2, last], range(10 * last, 10 * last + 4)) for last in (3, 8, 9)]
    return requests, NaiveConfig(5, 2, watermark=0.0, preemption="swap", num_host_blocks=9)


def the_carrier_is_evicted() -> Scene:
    prompts = [([7] * 5, [7] * 3, 0), ([7] * 7, [], 0), ([7, 7, 7, 8], [7, 7], -2)]
    requests = [request_of(prompt, output, priority=priority) for prompt, output, priority in prompts]
    return requests, NaiveConfig(9, 1, max_sequences=4, max_batched_tokens=6, watermark=0.0)


def each_more_urgent_than_the_last() -> Scene:
    requests = [
        request_of([1] * 3, range(100, 105), num_samples=2),
        request_of([2] * 3, range(200, 205), 1.0, priority=1),
        request_of([3] * 3, range(300, 303), 3.0, priority=2, num_samples=2),
        request_of([4] * 2, range(400, 408), 5.0, priority=3),
    ]
    swapping = NaiveConfig(13, 1, max_sequences=3, max_batched_tokens=3, watermark=0.0, preemption="swap")
    return requests, replace(swapping, num_host_blocks=50)


CONTROLS: list[tuple[type[NaiveServer], Callable[[], Scene]]] = [
    (with_space(NoWatermark), room_but_for_the_watermark),
    (with_space(EvictsNewest), one_after_another),
    (with_space(HitsLastToken), twice_the_same),
    (with_space(NeverCopiesOnWrite), three_samples),
    (with_space(NeverMerges), twice_the_same),
    (with_space(ForgetsOrphans), the_carrier_is_evicted),
    (with_space(CopiesTwins), three_with_a_common_prefix),
    (with_space(NamesNothingOnHost), three_with_a_common_prefix),
    (with_space(ReturnsWithoutRoom), three_with_a_common_prefix),
    (SwapsAnyNumber, each_more_urgent_than_the_last),
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
    "forgets duplicates whose carrier is gone",
    "copies what is there already",
    "finds nothing on the host",
    "returns without room for the next token",
    "swaps out more than may run",
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
