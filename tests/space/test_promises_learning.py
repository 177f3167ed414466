"""What an engine tells a policy that learns: the time, and how much was generated; and what it refuses to be told."""

import math
from typing import Any

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, FullAttention, SlidingWindow
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.pool.blocks import CLOCK_US, HAS_CLOCK
from pagedkv.pool.eviction.hazard.classes import output_of
from pagedkv.pool.eviction.hazard.layout import CLASSES, NEXT_RUN, TICKS, TICKS_PER_SECOND
from tests.space.spaces import new_space, prefill, tokens

GROUPS = FullAttention(4), SlidingWindow(6, 4)


def learning_space(num_blocks: int = 30) -> BlockSpace:
    """Build a space that learns."""
    return new_space(*GROUPS, num_blocks=num_blocks, eviction="hazard")


def latest_run(space: BlockSpace) -> tuple[int, int]:
    """Tell when the run was released that began last, and which outputs it is counted with."""
    pool = space._state.pools["device"].arrays
    run = pool.eviction_runs[pool.eviction[NEXT_RUN] - 1]
    return int(run[TICKS]), int(output_of(int(run[CLASSES])))


@pytest.mark.parametrize(("num_generated", "output"), [(None, 0), (0, 0), (1, 1), (500, 9), (2**40, 12)])
def test_runs_know_how_much_was_generated(num_generated: int | None, output: int) -> None:
    space = learning_space()
    row = prefill(space, tokens(9))
    space.free(row, num_generated=num_generated)
    assert latest_run(space)[1] == output
    space.check()


def test_each_row_has_outputs_of_its_own() -> None:
    space = learning_space()
    rows = [prefill(space, tokens(9, first=100 * number)) for number in range(3)]
    space.free(rows, num_generated=[500, 500, 3])
    assert latest_run(space)[1] == 2


def test_runs_know_the_time() -> None:
    space = learning_space()
    released = []
    for now_s in (100.0, 100 + 64.0):
        space.advance(now_s)
        space.free(prefill(space, tokens(9)))
        released.append(latest_run(space)[0])
    assert released[1] - released[0] == round(64 * TICKS_PER_SECOND)


def test_a_clock_that_goes_back_is_refused_and_nothing_is_changed() -> None:
    space = learning_space()
    space.advance(10.0)
    with pytest.raises(ConfigurationError, match=r"the clock cannot go back from 10.0 to 9.9 seconds"):
        space.advance(9.9)
    assert space._state.pools["device"].arrays.counts[CLOCK_US] == 10**7
    space.advance(10.0)


@pytest.mark.parametrize("wrong_s", [-math.inf, math.inf, math.nan, 2.0**41, -1, True, "soon", None])
def test_a_time_that_is_none_is_refused_and_nothing_is_changed(wrong_s: Any) -> None:  # noqa: ANN401
    space = learning_space()
    with pytest.raises(ConfigurationError, match="now must be a number of seconds from 0 to 1099511627776, got "):
        space.advance(wrong_s)
    assert not space._state.pools["device"].arrays.counts[HAS_CLOCK]
    space.advance(0)


@pytest.mark.parametrize("wrong", [[1], [1, 2, 3], [1, -1], [1.5, 2.0], [[1, 2]]])
def test_outputs_that_cannot_be_are_refused_and_nothing_is_changed(wrong: list[int]) -> None:
    space = learning_space()
    rows = [prefill(space, tokens(9)), prefill(space, tokens(9, first=100))]
    before = space.statistics()
    with pytest.raises(TokenError):
        space.free(rows, num_generated=wrong)
    assert space.statistics() == before
    space.check()
    space.free(rows, num_generated=[1, 2])


def test_an_answer_is_good_after_the_clock_went_on() -> None:
    space = learning_space()
    answer = space.match(tokens(9))
    space.advance(1.0)
    assert isinstance(space.allocate(tokens(9), match=answer), Allocation)


@pytest.mark.parametrize("eviction", ["lru", "adaptive", "fifo"])
def test_other_policies_are_told_the_same_and_do_the_same(eviction: str) -> None:
    told, untold = (new_space(*GROUPS, num_blocks=12, eviction=eviction) for _ in range(2))
    for number in range(8):
        told.advance(float(number))
        prompt = tokens(9, first=100 * (number % 3))
        told.free(prefill(told, prompt), num_generated=np.array([number]))
        untold.free(prefill(untold, prompt))
        assert told.statistics() == untold.statistics()
