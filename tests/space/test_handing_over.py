"""Which row computes what several rows wait for, when one leaves the open step (docs/decisions/0005-steps.md)."""

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import BlockSpace, ChunkedLocal, FullAttention, Replay, SlidingWindow
from pagedkv.blocks.record import PENDING_STEP
from pagedkv.space.growing import lower_start
from pagedkv.space.rows import NUM_PLANNED
from tests.space.spaces import acknowledge, allocate, cache, held, hit, new_space, prefill, run_step, tokens

Leave = Callable[[BlockSpace, int], object]


def free(space: BlockSpace, row: int) -> None:
    space.free(row)


def swap_out(space: BlockSpace, row: int) -> None:
    assert space.swap_out(row)


LEAVES = pytest.mark.parametrize("leave", [free, swap_out])


def computed(space: BlockSpace) -> dict[int, tuple[int, int]]:
    """Run the open step; return what it computed, by row."""
    compute = run_step(space).compute
    ranges = zip(compute.starts.tolist(), compute.ends.tolist(), strict=True)
    return dict(zip(compute.rows.tolist(), ranges, strict=True))


@pytest.mark.interpreted
@LEAVES
def test_promise_09_every_pending_block_finds_an_heir_that_holds_it(leave: Leave) -> None:
    """The row that shares the last block of the one that leaves does not hold the earlier ones, which a fork does."""
    space = new_space(num_host_blocks=20)
    s = allocate(space, tokens(8))
    a = allocate(space, [0])
    run_step(space)
    space.append(a, tokens(11, first=1), [11])
    (b,) = space.fork(a)
    space.free(s)
    c = allocate(space, tokens(13))
    assert space.block_ids(c)[:2] != space.block_ids(b)[:2]
    assert space.block_ids(c)[2] == space.block_ids(b)[2]
    leave(space, a)
    space.check()
    ranges = computed(space)
    assert ranges[int(b)] == (1, 12), "only the fork holds the first two blocks"
    assert ranges[c][1] == 13
    assert space.computed_block_ids(int(b)) == space.block_ids(int(b))


@pytest.mark.interpreted
@LEAVES
def test_promise_09_an_heir_starts_where_it_shares(leave: Leave) -> None:
    """A hit at a chunk's end holds that chunk alone, so its row cannot compute the chunks before."""
    space = new_space(ChunkedLocal(8, block_size=4), num_host_blocks=20)
    first, second = allocate(space, tokens(21)), allocate(space, tokens(21))
    assert held(space, second)[0] == space.block_ids(first)[4]
    leave(space, first)
    space.check()
    assert computed(space)[second] == (16, 21)


def test_promise_09_what_nobody_can_compute_any_more_is_unnamed() -> None:
    """Only the row that leaves held the first chunks: with it goes their content, named or not."""
    space = new_space(ChunkedLocal(8, block_size=4))
    first, _ = allocate(space, tokens(21)), allocate(space, tokens(21))
    space.free(first)
    run_step(space)
    assert hit(space, tokens(15)) == 0
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_09_blocks_of_one_row_may_need_several_heirs() -> None:
    """Two groups: a row with a hit in a window holds less of the window than of the full group."""
    space = new_space(FullAttention(4), SlidingWindow(4, block_size=2))
    a = allocate(space, tokens(20))
    b = allocate(space, tokens(13))
    c = allocate(space, tokens(9))
    space.free(a)
    space.check()
    ranges = computed(space)
    assert ranges[b] == (0, 13)
    assert ranges[c][1] == 9
    space.check()


@pytest.mark.interpreted
def test_promise_09_rows_that_leave_together_are_no_heirs() -> None:
    space = new_space()
    rows = [allocate(space, tokens(9)) for _ in range(4)]
    space.free([rows[0], rows[2]])
    space.check()
    ranges = computed(space)
    assert min(start for start, _ in ranges.values()) == 0
    assert set(ranges) == {rows[1], rows[3]}


def test_promise_09_a_swapped_out_heir_computes_what_it_waited_for() -> None:
    """Whoever takes over and is swapped out in the same step computes all of it after swapping in."""
    space = new_space(num_host_blocks=20)
    a, b = allocate(space, tokens(9)), allocate(space, tokens(9))
    assert space.swap_out(a)
    assert space.swap_out(b)
    run_step(space)
    assert space.swap_in(b)
    assert computed(space)[b] == (0, 9)
    space.check()


def test_promise_12_a_block_waits_for_the_last_step_of_each_row_that_dropped_it() -> None:
    """A row of step 2 drops a shared block first, then one of step 1: the block waits for step 2."""
    space = new_space()
    a = prefill(space, tokens(9))
    (b,) = space.fork(a)
    shared = space.block_ids(a)[0]
    space.append(int(b), [7])
    first = space.plan_step()
    space.append(a, [8])
    second = space.plan_step()
    space.free(a)
    space.free(int(b))
    space.reset_prefix_cache()
    acknowledge(space, first)
    assert space._state.groups[0].pool.block(shared).place == "deferred"
    acknowledge(space, second)
    assert space._state.groups[0].pool.block(shared).place == "free"
    space.check()


@pytest.mark.interpreted
def test_promise_12_a_due_block_is_freed_although_one_before_it_waits_longer() -> None:
    """A block held for the open step was released before one that a step in flight holds."""
    space = new_space(num_host_blocks=20)
    a, b = allocate(space, tokens(5)), allocate(space, tokens(5, first=50))
    plan = space.plan_step()
    assert space.swap_out(a)
    space.free(b)
    acknowledge(space, plan)
    assert space.num_deferred_blocks() == 2, "those of a, which the open plan copies"
    assert hit(space, tokens(5, first=50)) == 4
    allocate(space, tokens(6))
    space.check()


def test_promise_12_a_row_that_is_in_no_step_in_flight_waits_for_none() -> None:
    space = new_space()
    idle = prefill(space, tokens(8))
    allocate(space, tokens(8, first=50))
    plan = space.plan_step()
    space.free(idle)
    assert space.num_deferred_blocks() == 0
    acknowledge(space, plan)
    cache(space, tokens(3, first=90))
    space.check()


@pytest.mark.interpreted
def test_promise_07_what_a_live_row_holds_is_found_when_the_carrier_is_gone() -> None:
    """The first block is a duplicate of one whose row leaves; the second was published as the child of that one."""
    space = new_space(FullAttention(2))
    a, b = allocate(space, [0]), allocate(space, [0, 0])
    space.append(a, [0, 0, 2], [3])
    space.free(b)
    run_step(space)
    assert hit(space, [0, 0, 0, 2, 7]) == 4
    space.check()


def test_promise_07_a_duplicate_takes_the_name_of_a_carrier_that_was_evicted() -> None:
    """While a step computes it, a duplicate cannot be merged; its carrier is freed and evicted meanwhile."""
    space = new_space(num_blocks=9)
    first = prefill(space, tokens(8))
    second = allocate(space, tokens(5))
    space.append(second, [5, 6, 7], [3])
    plan = space.plan_step()
    space.free(first)
    allocate(space, tokens(24, first=500)[: 4 * space.num_free_blocks()])
    acknowledge(space, plan)
    run_step(space)
    assert hit(space, tokens(9)) == 8
    space.check()


def test_promise_07_forks_of_an_orphan_are_found_as_well() -> None:
    space = new_space(FullAttention(2))
    a, b = allocate(space, [0]), allocate(space, [0, 0])
    space.append(a, [0])
    (c,) = space.fork(a).tolist()
    space.append(c, [0, 2], [2])
    space.free(b)
    run_step(space)
    assert hit(space, [0, 0, 0, 2, 7]) == 4
    space.check()


@pytest.mark.interpreted
def test_promise_14_a_window_stays_before_what_a_row_is_to_compute_again() -> None:
    """A row inherits a start while a step in flight computes behind it; what that reads stays when the step is over."""
    space = new_space(SlidingWindow(4, 2))
    row = allocate(space, tokens(7))
    step = space.plan_step()
    lower_start(space._state.groups[0].arrays, space._state.rows, row, 4)
    acknowledge(space, step)
    space.check()
    assert computed(space) == {row: (4, 7)}
    space.check()
    assert space.block_ids(row)[:2] == [0, 0], "the window has moved on"


@pytest.mark.interpreted
@pytest.mark.parametrize("is_over", [False, True])
def test_promise_14_who_has_computed_a_block_inherits_nothing(*, is_over: bool) -> None:
    """Another row that shares it was to compute it again, and leaves."""
    space = new_space(SlidingWindow(4, 2))
    group, rows = space._state.groups[0], space._state.rows
    row = allocate(space, tokens(7))
    step = space.plan_step()
    (other,) = space.fork(row).tolist()
    if is_over:
        acknowledge(space, step)
    lower_start(group.arrays, rows, other, 6)
    group.pool.arrays.records[space.block_ids(other)[3], PENDING_STEP] = space._state.open_step
    space.free(other)
    assert len(space.plan_step().compute.rows) == 0
    assert rows[row, NUM_PLANNED] == 7


def replaying_space(*, whole: int, window: int) -> BlockSpace:
    """Full attention and a window that can be replayed, in blocks of these sizes."""
    return new_space(FullAttention(whole), SlidingWindow(4, window, replay=Replay(6, 1)), receipts=True)


def starts(space: BlockSpace) -> dict[int, tuple[int, int]]:
    """Run the open step; return where each row began in both groups."""
    plan = run_step(space)
    begun = zip(plan.compute_in(0).starts.tolist(), plan.compute_in(1).starts.tolist(), strict=True)
    return dict(zip(plan.compute.rows.tolist(), begun, strict=True))


@pytest.mark.interpreted
@pytest.mark.parametrize(("whole", "window"), [(4, 2), (2, 4)])
def test_promise_14_a_fork_at_a_prefix_begins_in_all_groups_at_once(whole: int, window: int) -> None:
    """The block of one group is copied, and its content computed; that of the other ends with the prefix."""
    space = replaying_space(whole=whole, window=window)
    row = allocate(space, tokens(8))
    forked = space.fork(row, at=6)
    assert isinstance(forked, np.ndarray)
    child = int(forked[0])
    space.check()
    assert starts(space)[child] == (4, 4)
    assert space.receipt(child).num_replayed == 0, "nothing was replayed"


@pytest.mark.interpreted
@pytest.mark.parametrize(("whole", "window"), [(4, 2), (2, 4)])
def test_promise_14_a_copy_on_write_is_computed_in_all_groups_at_once(whole: int, window: int) -> None:
    space = replaying_space(whole=whole, window=window)
    row = allocate(space, tokens(6))
    (child,) = space.fork(row).tolist()
    space.append(child, [6])
    space.check()
    assert starts(space)[child] == (4, 4)
    assert space.receipt(child).num_replayed == 0, "nothing was replayed"


@pytest.mark.interpreted
@pytest.mark.parametrize(("whole", "window"), [(4, 2), (2, 4)])
@LEAVES
def test_promise_14_whoever_inherits_a_start_inherits_it_in_every_group(leave: Leave, whole: int, window: int) -> None:
    """Two forks; one has a copy of its own in one group, so that the groups alone would choose different heirs."""
    groups = FullAttention(whole), SlidingWindow(4, window, replay=Replay(6, 1))
    space = new_space(*groups, num_host_blocks=40)
    row = allocate(space, tokens(6))
    first, second = space.fork(row, 2).tolist()
    space.append(first, [6])
    leave(space, row)
    space.check()
    begun = starts(space)
    assert min(begun.values()) == (0, 0)
    assert all(whole == window for whole, window in begun.values()), f"{begun} for rows {first} and {second}"
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("is_pending", [False, True])
def test_promise_14_of_rows_that_return_together_none_inherits_what_it_has_computed(*, is_pending: bool) -> None:
    """Two rows share blocks on the host, and one is to compute again what the other has computed, and leaves.

    The last block has to be computed by both; the one before it may be pending, too, as blocks of a returning row are.
    """
    space = new_space(SlidingWindow(8, 2), num_host_blocks=20)
    group, rows = space._state.groups[0], space._state.rows
    row = prefill(space, tokens(6))
    space.append(row, [6, 7, 8], [3])
    (other,) = space.fork(row).tolist()
    assert space.swap_out([row, other])
    run_step(space)
    lower_start(group.arrays, rows, other, 4)
    assert space.swap_in([row, other])
    shared = space.block_ids(row)[2]
    assert shared == space.block_ids(other)[2]
    pending, open_step = group.pool.arrays.records[:, PENDING_STEP], space._state.open_step
    assert pending[shared] < open_step, "it is computed"
    if is_pending:
        pending[shared] = open_step
    space.free(other)
    space.check()
    assert pending[shared] < open_step, "no row computes it any more"
    assert computed(space) == {row: (6, 9)}


@pytest.mark.interpreted
@pytest.mark.parametrize("grows_first", [True, False])
def test_promise_14_who_writes_into_a_copy_computes_only_what_the_copy_lacks(*, grows_first: bool) -> None:
    """A step in flight computes all of the block that a fork was to compute again: the copy has it, too."""
    space = new_space(SlidingWindow(8, 4))
    row = allocate(space, tokens(6))
    step = space.plan_step()
    other, third = space.fork(row, 2).tolist()
    lower_start(space._state.groups[0].arrays, space._state.rows, other, 4)
    space._state.groups[0].pool.arrays.records[space.block_ids(row)[1], PENDING_STEP] = space._state.open_step
    space._ledger.shares_pending = True
    batch = [row, third] if grows_first else [third, row]
    space.append(batch, [6, 6])
    space.check()
    acknowledge(space, step)
    ranges = computed(space)
    assert ranges[row] == ranges[third] == (6, 7)
    space.check()
