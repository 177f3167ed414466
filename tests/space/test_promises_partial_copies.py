"""Promise 24, in steps: the copy behind a hit inside a block is planned, carried out, fails, or is given up."""

import pytest

from pagedkv import AllocStatus, Shortage
from pagedkv.blocks.record import HOLD_STEP
from pagedkv.errors import SequenceError, StepError
from tests.space.partial_prompts import copies_of, leaving, space_of
from tests.space.spaces import acknowledge, allocate, cache, hit, only_pool, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted


def test_promise_24_what_the_open_step_computes_is_no_source() -> None:
    """Copies run before the forward pass."""
    space = space_of()
    allocate(space, tokens(12))
    assert hit(space, leaving(6)) == 4
    assert hit(space, leaving(3)) == 0
    space.plan_step()
    assert hit(space, leaving(6)) == 6


def test_promise_24_who_shares_what_the_open_step_computes_ends_where_blocks_end() -> None:
    """Two rows compute the same blocks in this step, and a settled one stands behind them."""
    space = space_of(num_blocks=7, num_host_blocks=6)
    row = prefill(space, tokens(11))
    space.append(row, [11])
    run_step(space)
    space.swap_out(row)
    run_step(space)
    space.free(prefill(space, tokens(24, first=50)))
    allocate(space, tokens(4))
    space.swap_in(row)
    answer = space.match(leaving(6))
    assert answer.num_tokens == 4
    space.check()


def test_promise_24_a_step_in_flight_that_fails_takes_its_source_along() -> None:
    space = space_of()
    maker = allocate(space, tokens(12))
    plan = space.plan_step()
    other = allocate(space, leaving(6))
    aborted = space.abort(plan.step_id)
    assert (aborted.rewound_rows, aborted.lost_rows) == ((maker,), (other,))
    space.check()
    assert hit(space, leaving(6)) == 4  # published anew, and computed in the open step
    run_step(space)
    assert hit(space, leaving(6)) == 6


def test_promise_24_a_copy_that_fails_loses_its_row_and_not_the_source() -> None:
    space = space_of()
    cache(space, tokens(12))
    row = allocate(space, leaving(6))
    plan = space.plan_step()
    assert space.abort(plan.step_id).lost_rows == (row,)
    space.free(row)
    space.check()
    assert hit(space, leaving(6)) == 6


@pytest.mark.parametrize("in_order", [False, True])
def test_promise_24_the_source_is_handed_to_nobody_before_it_is_copied(*, in_order: bool) -> None:
    space = space_of(num_blocks=8, in_order=in_order)
    cache(space, tokens(8))
    source = space.match(leaving(6)).tails[0].block
    allocate(space, leaving(6, 2))
    assert space.num_free_blocks() == 4
    assert space.num_deferred_blocks() == 1
    assert isinstance(space.allocate(tokens(20, first=900)), Shortage)
    rows = [allocate(space, tokens(16, first=900))]
    assert source not in space.block_ids(rows[0])
    plan = space.plan_step()
    assert space.num_free_blocks() == in_order
    if in_order:
        rows.append(allocate(space, tokens(3, first=700)))
        assert space.block_ids(rows[1]) == [source]
    acknowledge(space, plan)
    space.check()


def test_promise_24_the_source_may_be_freed_or_rolled_back_before_it_is_copied() -> None:
    space = space_of()
    maker = prefill(space, tokens(12))
    source = space.block_ids(maker)[1]
    for give_up, first in ((lambda: space.truncate([maker], [5]), 800), (lambda: space.free(maker), 900)):
        row = allocate(space, [*range(6), *range(first, first + 8)])
        give_up()
        space.check()
        copied = {target for _, _, target in copies_of(space.plan_step())}
        assert space.block_ids(row)[1] in copied
        assert space.block_ids(row)[1] != source
        acknowledge(space, *(step.plan for step in list(space._ledger.in_flight)))
        space.free(row)
        cache(space, tokens(12))
        space.check()


def test_promise_24_until_it_is_planned_a_row_with_a_copy_is_neither_swapped_out_nor_declared() -> None:
    space = space_of(num_host_blocks=20)
    cache(space, tokens(12))
    row = allocate(space, leaving(6))
    with unchanged(space):
        assert space.can_swap_out(row) is AllocStatus.LATER
        with pytest.raises(SequenceError, match="plan the step first"):
            space.swap_out(row)
        with pytest.raises(StepError, match="copies or swaps its block"):
            space.mark_computed(row)
    run_step(space)
    space.swap_out(row)
    run_step(space)
    space.swap_in(row)
    run_step(space)
    space.check()


def test_promise_24_forks_and_roll_backs_of_a_row_whose_copy_is_to_be_made() -> None:
    space = space_of()
    cache(space, tokens(12))
    source = space.match(leaving(6)).tails[0].block
    row = allocate(space, leaving(6, 1))
    (child,) = space.fork(row).tolist()
    (shorter,) = space.fork(row, at=5).tolist()  # type: ignore[union-attr]
    space.append([child, shorter], [1, 2])
    space.truncate([row], [5])
    space.check()
    plan = space.plan_step()
    own = {space.block_ids(each)[1] for each in (row, child, shorter)}
    assert len(own) == 3
    assert {(origin, target) for _, origin, target in copies_of(plan)} >= {(source, block) for block in own}
    acknowledge(space, plan)
    space.free([row, child, shorter])
    space.check()


def test_promise_24_a_row_given_up_before_its_copy_leaves_all_as_it_was() -> None:
    space = space_of()
    cache(space, tokens(12))
    space.free(allocate(space, leaving(6)))
    run_step(space)
    space.check()
    assert space.num_free_blocks() == 100
    assert hit(space, leaving(6)) == 6


def test_promise_24_content_that_is_withdrawn_takes_along_who_has_copied_it() -> None:
    space = space_of()
    maker = prefill(space, tokens(12))
    bad = space.block_ids(maker)[1]
    copied, sound = allocate(space, leaving(6)), allocate(space, leaving(4))
    run_step(space)
    answer = space.withdraw([bad])
    assert dict(zip(answer.lost_rows, answer.first_positions, strict=True)) == {maker: 4, copied: 4}
    assert hit(space, leaving(6)) == 4
    space.free([maker, copied, sound])
    space.check()


# The audit


def test_promise_17_a_block_that_the_open_plan_copies_and_nobody_holds_for_it_is_noticed() -> None:
    for place in (0, 1):
        space = space_of()
        cache(space, tokens(12))
        allocate(space, leaving(6))
        (move,) = space._ledger._open.copies["device"].items()
        only_pool(space).arrays.records[move[place], HOLD_STEP] = 0
        with pytest.raises(AssertionError, match="a deferred block is due" if place else "moves block"):
            space.check()
