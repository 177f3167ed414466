"""The manager's promise about preemption (docs/design.md, Promises: 13), by direct examples."""

import numpy as np
import pytest

from pagedkv import AllocStatus, FullAttention, RecurrentState, SlidingWindow
from pagedkv.errors import TokenError
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    held,
    hit,
    new_space,
    pairs,
    place,
    prefill,
    run_step,
    tokens,
)

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


# 13. Preemption


@pytest.mark.interpreted
def test_promise_13_preemption_by_recomputing_finds_its_blocks_again() -> None:
    space = new_space(num_blocks=9)
    row = prefill(space, tokens(14))
    space.free(row)
    cache(space, tokens(8, first=100))
    assert hit(space, tokens(14)) == 12
    assert len(held(space, allocate(space, tokens(14)))) == 4


@pytest.mark.interpreted
def test_promise_13_swapping_out_and_in_is_planned_copies() -> None:
    space = new_space(num_host_blocks=11)
    row = prefill(space, tokens(10))
    device = space.block_ids(row)
    out = pairs(space.swap_out([row]))
    assert [source for source, _ in out] == device
    host = space.block_ids(row)
    assert [destination for _, destination in out] == host
    assert pairs(run_step(space).swaps_out) == out
    space.reset_prefix_cache()  # else what the device still caches is shared, not copied
    back = pairs(space.swap_in([row]))
    assert [source for source, _ in back] == host
    assert [destination for _, destination in back] == space.block_ids(row)
    assert pairs(run_step(space).swaps_in) == back
    assert space.num_tokens(row) == 10
    space.check()


@pytest.mark.interpreted
def test_promise_13_shared_blocks_are_moved_once() -> None:
    space = new_space(num_host_blocks=11)
    rows = [prefill(space, tokens(10))]
    rows += space.fork(rows[0], 2).tolist()
    space.append(rows[2:], [10])
    run_step(space)
    assert len(pairs(space.swap_out(rows))) == 4
    run_step(space)
    tables = [space.block_ids(row) for row in rows]
    assert tables[0] == tables[1]
    assert tables[0][:2] == tables[2][:2]
    space.reset_prefix_cache()
    assert len(pairs(space.swap_in(rows))) == 4
    run_step(space)
    assert space.block_ids(rows[0]) == space.block_ids(rows[1])
    space.check()


@pytest.mark.interpreted
def test_promise_13_a_block_is_released_only_after_its_copy_is_acknowledged() -> None:
    space = new_space(num_blocks=4, num_host_blocks=4)
    row = prefill(space, tokens(12))
    blocks = space.block_ids(row)
    space.swap_out([row])
    assert [place(space, block) for block in blocks] == ["deferred"] * 3
    assert space.can_allocate(tokens(4, first=100)) is LATER
    plan = space.plan_step()
    assert [place(space, block) for block in blocks] == ["deferred"] * 3
    acknowledge(space, plan)
    assert space.can_allocate(tokens(12, first=100)) is OK
    space.reset_prefix_cache()
    space.swap_in([row])
    (host,) = space.statistics().host_pools
    assert (host.num_deferred, host.num_free) == (3, 0)
    run_step(space)
    (host,) = space.statistics().host_pools
    assert (host.num_deferred, host.num_free) == (0, 3)


def test_promise_13_what_others_share_stays_on_the_device() -> None:
    space = new_space(num_host_blocks=11)
    row = prefill(space, tokens(10))
    (child,) = space.fork(row)
    device = space.block_ids(row)
    space.swap_out([row])
    run_step(space)
    assert space.block_ids(child) == device
    space.check()


def test_promise_13_questions_about_swapping() -> None:
    space = new_space(num_blocks=8, num_host_blocks=4, watermark=0.2)
    rows = [prefill(space, tokens(12)), prefill(space, tokens(8, first=100)), prefill(space, tokens(4, first=200))]
    assert space.can_swap_out(rows[:1]) is OK
    assert space.can_swap_out(rows) is NEVER
    space.swap_out(rows[:1])
    run_step(space)
    assert space.can_swap_out(rows[1:2]) is LATER
    space.reset_prefix_cache()
    assert space.can_swap_in(rows[:1], [0]) is OK
    assert space.can_swap_in(rows[:1]) is LATER, "the next token begins a block, and the watermark keeps one"
    allocate(space, tokens(4, first=300))
    assert space.can_swap_in(rows[:1], [0]) is LATER  # three free blocks, of which the watermark keeps one


@pytest.mark.interpreted
def test_promise_13_what_swaps_in_must_be_able_to_go_on() -> None:
    """Two rows that share a partly filled block: whoever writes next, or reserves slots, copies it."""
    space = new_space(num_blocks=3, num_host_blocks=3)
    row = prefill(space, tokens(5))
    rows = [row, *space.fork(row).tolist()]
    run_step(space)
    space.swap_out(rows)
    run_step(space)
    assert space.can_swap_in(rows, num_lookahead=1) is NEVER
    assert space.can_swap_in(rows) is NEVER
    assert space.can_swap_in(rows, [1, 0]) is NEVER
    assert space.can_swap_in(rows, [0, 0]) is OK
    space.free(rows[1])
    assert space.can_swap_in(rows[:1], num_lookahead=2) is OK
    assert space.can_swap_in(rows[:1], [4]) is NEVER
    space.swap_in(rows[:1])
    assert space.can_append(rows[:1], [1], num_lookahead=2)
    with pytest.raises(TokenError):
        space.can_append(rows[:1], [-1])


@pytest.mark.interpreted
def test_promise_13_what_the_device_still_caches_is_shared_when_swapping_in() -> None:
    space = new_space(num_host_blocks=11)
    row = prefill(space, tokens(10))
    device = space.block_ids(row)
    space.swap_out(row)
    run_step(space)
    assert hit(space, tokens(10)) == 8
    assert len(pairs(space.swap_in(row))) == 1, "the full blocks are there; the partly filled one has no name"
    assert space.block_ids(row)[:2] == device[:2]
    assert run_step(space).compute.rows.tolist() == []
    assert space.computed_block_ids(row) == device[:2]
    space.check()


@pytest.mark.interpreted
def test_promise_13_a_prefix_is_on_the_host_once() -> None:
    """Two requests swapped out one after the other; what the first has brought there serves the second."""
    space = new_space(num_host_blocks=11)
    first, second = prefill(space, tokens(10)), prefill(space, [*tokens(8), 77, 78])
    space.swap_out(first)
    run_step(space)
    assert len(pairs(space.swap_out(second))) == 1
    assert space.block_ids(first)[:2] == space.block_ids(second)[:2]
    run_step(space)
    (host,) = space.statistics().host_pools
    assert host.num_in_use == 4
    space.free(first)
    space.check()
    cache(space, tokens(400, first=1000))  # evicts what the device has of it
    assert len(pairs(space.swap_in(second))) == 3
    run_step(space)
    space.check()


def test_promise_13_what_was_never_computed_has_no_twin() -> None:
    """Swapped out before its step ran, a row computes its prompt when it is back, whoever else has the same content."""
    space = new_space(num_host_blocks=11)
    row = allocate(space, tokens(10))
    space.swap_out(row)
    run_step(space)
    other = prefill(space, tokens(10))
    space.swap_in(row)
    plan = run_step(space)
    assert (plan.compute.rows.tolist(), plan.compute.starts.tolist()) == ([row], [0])
    assert not set(space.block_ids(row)[:2]) - set(space.block_ids(other)[:2]), "merged once it is computed"
    space.check()


def test_promise_13_a_failed_swap_takes_its_twins_along() -> None:
    space = new_space(num_host_blocks=11)
    first, second = prefill(space, tokens(10)), prefill(space, [*tokens(8), 77, 78])
    space.swap_out(first)
    plan = space.plan_step()
    space.swap_out(second)
    assert space.abort(plan.step_id).lost_rows == (first, second)
    space.free([first, second])
    space.check()


def test_promise_13_what_the_open_plan_writes_cannot_be_swapped_out_before_it_is_planned() -> None:
    space = new_space(num_host_blocks=11)
    row = prefill(space, tokens(6))
    (child,) = space.fork(row)
    space.append([child], [6])
    assert space.can_swap_out([child]) is LATER
    assert space.can_swap_out([row]) is OK
    run_step(space)
    assert space.can_swap_out([child]) is OK


def test_promise_13_a_host_pool_that_is_missing_is_never_enough() -> None:
    space = new_space()
    assert space.can_swap_out([prefill(space, tokens(4))]) is NEVER


def test_promise_13_a_swapped_out_sequence_can_be_freed() -> None:
    space = new_space(num_host_blocks=11)
    row = prefill(space, tokens(10))
    space.swap_out([row])
    run_step(space)
    space.free([row])
    (host,) = space.statistics().host_pools
    assert host.num_free == 10
    space.check()


def test_promise_13_a_swapped_in_sequence_is_found_again() -> None:
    """Its blocks on the device were evicted meanwhile."""
    space = new_space(num_blocks=6, num_host_blocks=4)
    row = prefill(space, tokens(9))
    space.swap_out([row])
    run_step(space)
    cache(space, tokens(20, first=100))
    assert hit(space, tokens(9)) == 0
    space.swap_in([row])
    assert hit(space, tokens(9)) == 8


def test_promise_13_what_was_not_computed_before_is_computed_after() -> None:
    """Swapped out between its allocation and the plan."""
    space = new_space(num_host_blocks=11)
    row = allocate(space, tokens(6))
    space.swap_out([row])
    assert run_step(space).compute.rows.tolist() == []
    space.swap_in([row])
    compute = run_step(space).compute
    assert (compute.rows.tolist(), compute.starts.tolist(), compute.ends.tolist()) == ([row], [0], [6])


def test_promise_13_windows_and_states_are_swapped_without_what_they_have_released() -> None:
    groups = FullAttention(4), SlidingWindow(4, 4), RecurrentState(4)
    sizes = {"device": 41, "state": 11}
    space = new_space(*groups, num_blocks=sizes, num_host_blocks=sizes)
    row = prefill(space, tokens(17))
    kept = [held(space, row, group) for group in range(3)]
    assert [len(blocks) for blocks in kept] == [5, 2, 1]
    moves = space.swap_out([row])
    assert isinstance(moves, tuple)
    assert {move.pool: move.src_ids.tolist() for move in moves} == {"device": kept[0] + kept[1], "state": kept[2]}
    run_step(space)
    space.swap_in([row])
    run_step(space)
    assert [len(held(space, row, group)) for group in range(3)] == [5, 2, 1]
    assert np.flatnonzero(space.block_ids(row, 1)).tolist() == [3, 4]
    space.check()
