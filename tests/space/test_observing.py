"""An observer of a space is called at every moment, in order, and may call the space's questions then."""

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, Load, Shortage, hash_request_tokens
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.space import ObservedSpace, PrefixHit, SpaceObserver
from pagedkv.space.observer import MOMENTS, register
from pagedkv.space.state import Observers
from pagedkv.space.steps import InFlightStep
from tests.space.spaces import new_space, tokens

pytestmark = pytest.mark.interpreted


class _Diary(SpaceObserver):
    """Writes down moments, and what the space answers then."""

    def __init__(self) -> None:
        self.moments: list[tuple[object, ...]] = []

    def begin(self, space: ObservedSpace) -> None:
        self._space = space

    def admitting(self, row: int, hit: PrefixHit) -> None:
        misses = [miss.cause.value for miss in self._space.misses(hit)]
        self.moments.append(("admitting", row, hit.num_tokens, self._space.statistics().num_tokens, misses))

    def admitted(self, row: int, hit: PrefixHit, num_reached: int) -> None:
        self.moments.append(("admitted", row, hit.num_tokens, num_reached, self._space.num_tokens(row)))

    def forked(self, parent: int, children: Int32Array, num_tokens: int) -> None:
        self.moments.append(("forked", parent, children.tolist(), num_tokens))

    def grown(self, batch: Int32Array) -> None:
        self.moments.append(("grown", batch.tolist(), self._space.lengths(batch).tolist()))

    def leaving(self, batch: Int32Array) -> None:
        self.moments.append(("leaving", batch.tolist(), [self._space.block_ids(row) for row in batch.tolist()]))

    def freed(self, batch: Int32Array) -> None:
        self.moments.append(("freed", batch.tolist(), self._space.statistics().num_running))

    def planned(self, step: InFlightStep) -> None:
        self.moments.append(("planned", step.plan.step_id))

    def acknowledging(self, step: InFlightStep) -> None:
        self.moments.append(("acknowledging", step.plan.step_id))

    def acknowledged(self, step: InFlightStep) -> None:
        self.moments.append(("acknowledged", step.plan.step_id))

    def aborted(self, step: InFlightStep) -> None:
        self.moments.append(("aborted", step.plan.step_id))

    def load_begun(self, load: Load, hit: PrefixHit) -> None:
        self.moments.append(("load_begun", load.num_tokens, hit.num_tokens))

    def load_ended(self, load: Load) -> None:
        self.moments.append(("load_ended", load.num_tokens, self._space.num_cached_blocks()))

    def advanced(self, now_s: float) -> None:
        self.moments.append(("advanced", now_s))

    def withdrawn(self, digests: frozenset[bytes] | None) -> None:
        self.moments.append(("withdrawn", digests))


def admitted(space: BlockSpace) -> int:
    allocation = space.allocate(tokens(6))
    assert isinstance(allocation, Allocation)
    return allocation.row


def test_every_moment_is_called_in_order() -> None:
    space, diary = new_space(explain=True), _Diary()
    space.observe(diary)
    row = admitted(space)
    first = space.plan_step().step_id
    space.acknowledge(first)
    children = space.fork(row, 2)
    space.append(children, [7, 8])
    second = space.plan_step().step_id
    space.abort(second)
    space.advance(3.0)
    space.free(children)
    assert diary.moments == [
        ("admitting", 0, 0, 0, ["never stored", "block not full"]),
        ("admitted", 0, 0, 0, 6),
        ("planned", first),
        ("acknowledging", first),
        ("acknowledged", first),
        ("forked", 0, [1, 2], 6),
        ("grown", [1, 2], [7, 7]),
        ("planned", second),
        ("aborted", second),
        ("advanced", 3.0),
        ("leaving", [1, 2], [[1, 3], [1, 4]]),
        ("freed", [1, 2], 1),
    ]


def test_rows_that_are_swapped_are_told_both_ways() -> None:
    class Swaps(SpaceObserver):
        def __init__(self) -> None:
            self.moments: list[tuple[str, list[int]]] = []

        def leaving(self, batch: Int32Array) -> None:
            self.moments.append(("leaving", batch.tolist()))

        def swapped_out(self, batch: Int32Array) -> None:
            self.moments.append(("swapped out", batch.tolist()))

        def returned(self, batch: Int32Array) -> None:
            self.moments.append(("returned", batch.tolist()))

    space, swaps = new_space(num_host_blocks=20), Swaps()
    space.observe(swaps)
    row = admitted(space)
    space.acknowledge(space.plan_step().step_id)
    space.swap_out([row])
    space.acknowledge(space.plan_step().step_id)
    space.swap_in([row])
    assert swaps.moments == [("leaving", [row]), ("swapped out", [row]), ("returned", [row])]


def test_a_load_begins_and_ends() -> None:
    space, diary = new_space(), _Diary()
    space.observe(diary)
    load = space.load(tokens(8), 8)
    assert isinstance(load, Load)
    space.finish_load(load)
    assert diary.moments == [("load_begun", 8, 0), ("load_ended", 8, 2)]


def test_withdrawn_content_is_told_with_what_continues_it() -> None:
    space, diary = new_space(), _Diary()
    row = space.allocate(tokens(13)).row
    space.acknowledge(space.plan_step().step_id)
    blocks = space.block_ids(row)
    space.observe(diary)
    names = hash_request_tokens(tokens(12), 4)
    space.withdraw([blocks[1]])
    assert diary.moments == [("withdrawn", frozenset(names[1:3]))]
    space.withdraw([blocks[3]])  # not full, and so without a name
    assert len(diary.moments) == 1


def test_an_observer_is_called_at_the_moments_that_it_overrides() -> None:
    class Dates(SpaceObserver):
        def advanced(self, now_s: float) -> None:
            self.now_s = now_s

    observers, dates, diary = Observers(), Dates(), _Diary()
    register(observers, dates)
    register(observers, diary)
    assert observers.check == (dates.check, diary.check)
    assert observers.advanced == (dates.advanced, diary.advanced)
    assert observers.grown == (diary.grown,)
    assert set(MOMENTS) == set(Observers.__annotations__) - {"check"}, "a moment has no list of observers"


def test_what_is_refused_is_no_moment() -> None:
    space, diary = new_space(num_blocks=3), _Diary()
    space.observe(diary)
    assert isinstance(space.allocate(np.arange(100)), Shortage)
    assert diary.moments == []


def test_something_else_is_no_observer() -> None:
    with pytest.raises(ConfigurationError, match="an observer is a SpaceObserver, got 7"):
        new_space().observe(7)  # type: ignore[arg-type]
