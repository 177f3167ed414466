"""Rows that wait for what another row computes: that row leaves, or its step fails, or nothing is waited for."""

import pytest

from pagedkv import BlockSpace, StepPlan
from tests.space.spaces import acknowledge, allocate, hit, new_space, prefill, run_step, tokens


def ranges(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """The positions that a plan computes, by row."""
    compute = plan.compute
    starts_and_ends = zip(compute.starts.tolist(), compute.ends.tolist(), strict=True)
    return dict(zip(compute.rows.tolist(), starts_and_ends, strict=True))


def two_of_one_prompt(space: BlockSpace) -> tuple[int, int]:
    """Two rows of one step: the second shares blocks that the first is to compute."""
    first, second = allocate(space, tokens(9)), allocate(space, tokens(9))
    assert space.block_ids(first)[:2] == space.block_ids(second)[:2]
    return first, second


@pytest.mark.interpreted
def test_promise_09_rows_that_were_declared_computed_survive_the_failing_step() -> None:
    space = new_space()
    rows = two_of_one_prompt(space)
    plan = space.plan_step()
    space.mark_computed(rows)
    aborted = space.abort(plan.step_id)
    assert (aborted.rewound_rows, aborted.lost_rows) == ((), ())
    space.check()


@pytest.mark.interpreted
def test_promise_09_a_new_sequence_does_not_wait_for_what_its_rows_last_one_waited_for() -> None:
    space = new_space()
    first, second = two_of_one_prompt(space)
    plan = space.plan_step()
    space.free(second)
    assert allocate(space, tokens(5, first=50)) == second
    assert space.abort(plan.step_id).lost_rows == ()
    assert ranges(run_step(space)) == {first: (0, 9), second: (0, 5)}


@pytest.mark.interpreted
def test_promise_09_who_is_swapped_out_while_waiting_computes_it_all_later() -> None:
    """The swap is carried out before the step computes what the row waits for."""
    space = new_space(num_host_blocks=10)
    first, second = two_of_one_prompt(space)
    assert space.swap_out(second)
    assert ranges(run_step(space)) == {first: (0, 9)}
    assert space.swap_in(second)
    assert ranges(run_step(space)) == {second: (0, 9)}
    space.check()


@pytest.mark.interpreted
def test_promise_09_what_lost_rows_alone_still_hold_is_not_found() -> None:
    space = new_space()
    first, second = two_of_one_prompt(space)
    plan = space.plan_step()
    aborted = space.abort(plan.step_id)
    assert (aborted.rewound_rows, aborted.lost_rows) == ((first,), (second,))
    assert hit(space, tokens(9)) == 8, "the first row computes it again"
    space.free(first)
    assert hit(space, tokens(9)) == 0
    run_step(space)
    assert hit(space, tokens(9)) == 0
    space.check()


@pytest.mark.interpreted
def test_promise_09_who_stays_with_the_original_computes_it_when_its_computer_leaves_with_a_copy() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    (child,) = space.fork(row).tolist()
    space.append(row, [6])
    assert ranges(space.plan_step()) == {row: (0, 7), child: (4, 6)}
    space.check()


def test_promise_09_what_comes_from_the_host_uncomputed_is_computed_when_its_step_is_acknowledged() -> None:
    space = new_space(num_host_blocks=10)
    row = allocate(space, tokens(9))
    assert space.swap_out(row)
    run_step(space)
    assert space.swap_in(row)
    plan = space.plan_step()
    assert space.computed_block_ids(row) == []
    space.acknowledge(plan.step_id)
    assert space.computed_block_ids(row) == space.block_ids(row)[:2]


def test_promise_09_what_is_computed_again_after_a_failed_step_is_found_again() -> None:
    space = new_space()
    allocate(space, tokens(9))
    space.abort(space.plan_step().step_id)
    run_step(space)
    assert hit(space, tokens(9)) == 8


@pytest.mark.interpreted
def test_promise_09_what_stands_before_settled_blocks_is_declared_computed_too() -> None:
    """A row hits a first block that a step in flight computes, and a second one that was computed before.

    The second was published anew, when the first block that it followed had been evicted.
    """
    space = new_space(num_blocks=6)
    first, filler = prefill(space, tokens(4)), prefill(space, tokens(3, first=90))
    row = allocate(space, tokens(3))
    space.append(row, tokens(6, first=3), [6])
    plan = space.plan_step()
    space.free(first)
    space.free(allocate(space, tokens(3, first=50)))
    again = allocate(space, tokens(4))
    acknowledge(space, plan)
    plan = space.plan_step()
    space.free(filler)
    hitting = allocate(space, tokens(9))
    assert space.block_ids(hitting)[:2] == [space.block_ids(again)[0], space.block_ids(row)[1]]
    space.free(again)
    space.mark_computed(hitting)
    assert space.computed_block_ids(hitting) == space.block_ids(hitting)[:2]
    assert space.abort(plan.step_id).lost_rows == ()
    assert hit(space, tokens(9)) == 8
    space.check()
