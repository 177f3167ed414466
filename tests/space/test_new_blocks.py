"""What a plan calls new: blocks allocated since the plan before and without content, and no others."""

import pytest

from pagedkv import BlockSpace, FullAttention, RecurrentState, SlidingWindow, StepPlan
from tests.space.spaces import acknowledge, allocate, cache, held, new_space, prefill, run_step, tokens

pytestmark = pytest.mark.interpreted


def new_in(plan: StepPlan) -> dict[str, list[int]]:
    return {new.pool: new.block_ids.tolist() for new in plan.new_blocks}


def planned(space: BlockSpace) -> list[int]:
    """New blocks of the next plan, in the only pool."""
    return new_in(space.plan_step()).get("device", [])


def test_blocks_of_a_prompt_are_new_once_reserved_ones_included() -> None:
    space = new_space()
    row = allocate(space, tokens(6), num_lookahead=6)
    assert planned(space) == held(space, row) == [1, 2, 3]
    assert planned(space) == []
    space.append(row, tokens(7), [7])
    assert planned(space) == [4]


def test_blocks_of_a_hit_are_not_new() -> None:
    space = new_space()
    cache(space, tokens(8))
    row = allocate(space, tokens(11))
    assert planned(space) == held(space, row)[2:]


def test_destinations_of_copies_and_swaps_are_not_new() -> None:
    space = new_space(num_host_blocks=20)
    row = prefill(space, tokens(6))
    (child,) = space.fork(row)
    space.append(int(child), [1], num_lookahead=3)
    plan = space.plan_step()
    assert plan.copies[0].dst_ids.tolist() == [held(space, int(child))[1]]
    assert new_in(plan)["device"] == [held(space, int(child))[2]]
    acknowledge(space, plan)
    space.swap_out(row)
    assert planned(space) == []
    space.swap_in(row)
    assert planned(space) == []


def test_a_new_block_that_is_copied_on_write_stays_new() -> None:
    """It may be zeroed: the copy reads it, and it is not computed yet."""
    space = new_space()
    row = allocate(space, tokens(6))
    (child,) = space.fork(row)
    space.append(int(child), [1])
    plan = space.plan_step()
    assert new_in(plan)["device"] == held(space, row)
    assert plan.copies[0].src_ids.tolist() == [held(space, row)[1]]


def test_blocks_that_were_freed_again_are_left_out() -> None:
    space = new_space()
    row = allocate(space, tokens(6), num_lookahead=10)
    space.truncate(row, [6])
    space.free(allocate(space, tokens(9, first=50)))
    assert planned(space) == held(space, row)


def test_a_block_stays_new_while_anybody_holds_it() -> None:
    """By a fork, or by a hit within the step: whoever took it may be gone before the plan."""
    space = new_space()
    row = allocate(space, tokens(9))
    blocks = held(space, row)
    (child,) = space.fork(row)
    sharer = allocate(space, tokens(10))
    space.free(row)
    assert held(space, int(child)) == blocks
    assert sorted(planned(space)) == sorted({*blocks, *held(space, sharer)})


def test_blocks_that_somebody_filled_are_not_new_but_those_reserved_are() -> None:
    space = new_space()
    row = allocate(space, tokens(8), num_lookahead=4)
    space.mark_computed(row)
    assert planned(space) == held(space, row)[2:]


def test_what_an_aborted_plan_handed_out_is_new_again() -> None:
    space = new_space()
    kept = prefill(space, tokens(4))
    row = allocate(space, tokens(6, first=50), num_lookahead=4)
    freed = allocate(space, tokens(6, first=90))
    plan = space.plan_step()
    space.append(kept, [1])
    later = space.plan_step()
    space.free(freed)
    space.abort(plan.step_id)
    assert sorted(planned(space)) == sorted([*held(space, row), *new_in(later)["device"]])


def test_what_was_filled_meanwhile_is_not_new_again_after_an_abort() -> None:
    space = new_space()
    row = allocate(space, tokens(6), num_lookahead=4)
    plan = space.plan_step()
    space.mark_computed(row)
    space.abort(plan.step_id)
    assert planned(space) == held(space, row)[2:]


def test_new_blocks_are_told_pool_by_pool() -> None:
    groups = FullAttention(4), SlidingWindow(8, 4), RecurrentState(4)
    space = new_space(*groups, num_blocks={"device": 50, "state": 20})
    row = allocate(space, tokens(7))
    listed = new_in(space.plan_step())
    assert listed == {"device": [*held(space, row, 0), *held(space, row, 1)], "state": held(space, row, 2)}


def test_a_block_handed_out_again_is_new_again() -> None:
    space = new_space(num_blocks=4)
    for first in range(3):
        row = allocate(space, tokens(12, first=100 * first))
        plan = space.plan_step()
        assert sorted(new_in(plan)["device"]) == [1, 2, 3]
        acknowledge(space, plan)
        space.free(row)
    assert run_step(space).new_blocks == ()
