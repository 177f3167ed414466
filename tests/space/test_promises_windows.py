"""Windows and chunks hold what their next position reads: not less, and not for ever."""

import pytest

from pagedkv import ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from pagedkv.errors import SharedPrefixError
from tests.space.spaces import acknowledge, allocate, new_space, prefill, run_step, tokens, unchanged


@pytest.mark.interpreted
def test_promise_15_chunks_that_come_anew_after_a_rollback_are_given_back_again() -> None:
    """Where a chunk begins nothing before it is read, so a row can be rolled back to there."""
    space = new_space(ChunkedLocal(8, block_size=4))
    row = prefill(space, tokens(20))
    space.truncate(row, [8])
    space.append(row, tokens(9, first=60), [9])
    run_step(space)
    assert [bool(block) for block in space.block_ids(row)] == [False] * 4 + [True]
    space.check()


@pytest.mark.interpreted
def test_promise_14_the_step_of_a_sequence_that_is_gone_moves_no_window() -> None:
    """Another sequence has its row, and is not computed yet: should its step fail, all of it is read again."""
    space = new_space(SlidingWindow(4, 2))
    row = allocate(space, tokens(32))
    first = space.plan_step()
    space.free(row)
    assert allocate(space, tokens(10, first=50)) == row
    second = space.plan_step()
    acknowledge(space, first)
    assert all(space.block_ids(row))
    acknowledge(space, second)
    assert [bool(block) for block in space.block_ids(row)] == [False] * 3 + [True] * 2
    space.check()


@pytest.mark.interpreted
def test_promise_11_nobody_is_rolled_back_into_a_block_that_others_hold() -> None:
    """What comes next would be written where the others read."""
    space = new_space()
    row = prefill(space, tokens(6))
    space.fork(row)
    with unchanged(space), pytest.raises(SharedPrefixError):
        space.truncate(row, [5])


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [(SlidingWindow(4, 4),), (FullAttention(4), SlidingWindow(4, 4))], ids=str)
def test_promise_14_a_row_that_waited_and_is_in_a_later_step_keeps_what_that_step_reads(
    groups: tuple[GroupSpec, ...],
) -> None:
    """It hit what the first step computes, and the second step, in flight, continues from the end of that hit."""
    space = new_space(*groups)
    first_row = allocate(space, tokens(9))
    second_row = allocate(space, tokens(9))
    (child,) = space.fork(second_row).tolist()
    first = space.plan_step()
    for row in (second_row, child):
        space.append([row], tokens(16, first=500 + row), [16])
    second = space.plan_step()
    acknowledge(space, first)
    starts = dict(zip(second.compute.rows.tolist(), second.compute.starts.tolist(), strict=True))
    for row in (second_row, child):
        read = range((starts[row] - 3) // 4, 25 // 4 + 1)
        held = space.block_ids(row, len(groups) - 1)
        assert all(held[index] for index in read), f"row {row} from {starts[row]} on: {held}"
    space.check()
    acknowledge(space, second)
    for row in (second_row, child):
        assert [bool(block) for block in space.block_ids(row, len(groups) - 1)] == [False] * 5 + [True] * 2
    space.free([first_row, second_row, child])
    space.check()
