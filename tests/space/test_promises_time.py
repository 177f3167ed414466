"""The manager's promises about time (docs/design.md, Promises: 11 to 13), each by direct examples."""

import numpy as np
import pytest

from pagedkv import AllocStatus, BlockSpace, FullAttention, RecurrentState, SlidingWindow
from pagedkv.plan import BlockMoves
from tests.space.spaces import acknowledge, allocate, cache, held, hit, new_space, only_pool, prefill, run_step, tokens

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def place(space: BlockSpace, block: int) -> str:
    return only_pool(space).block(block).place


def pairs(moves: object) -> list[tuple[int, int]]:
    """The moves as (source, destination)."""
    assert isinstance(moves, tuple)
    return [
        pair
        for move in moves
        if isinstance(move, BlockMoves)
        for pair in zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)
    ]


# 11. Lookahead and rolling back


def test_promise_11_lookahead_slots_are_reserved_and_used() -> None:
    space = new_space()
    row = allocate(space, tokens(6), num_lookahead=5)
    blocks = space.block_ids(row)
    assert len(blocks) == 3
    space.append([row], tokens(5, first=6), [5])
    assert space.block_ids(row) == blocks


@pytest.mark.interpreted
def test_promise_11_lookahead_slots_are_given_back() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    before = space.num_free_blocks()
    space.append([row], [], [0], num_lookahead=9)
    assert space.num_free_blocks() == before - 2
    space.truncate([row], [6])
    assert space.num_free_blocks() == before
    assert space.num_tokens(row) == 6


def test_promise_11_reserved_slots_are_not_shared_with_a_fork() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.append([row], [], [0], num_lookahead=9)
    (child,) = space.fork(row)
    assert space.block_ids(child) == space.block_ids(row)[:2]


@pytest.mark.interpreted
@pytest.mark.parametrize("length", range(1, 14))
def test_promise_11_truncate_rolls_back_to_any_earlier_length(length: int) -> None:
    space = new_space()
    row = prefill(space, tokens(9))
    space.append([row], tokens(4, first=9), [4])
    run_step(space)
    space.truncate([row], [length])
    assert space.num_tokens(row) == length
    assert len(space.block_ids(row)) == -(-length // 4)
    space.append([row], [77])
    plan = run_step(space)
    assert (plan.compute.starts.tolist(), plan.compute.ends.tolist()) == ([length], [length + 1])
    space.check()


@pytest.mark.interpreted
def test_promise_11_only_accepted_drafts_are_published() -> None:
    """Of five drafts three are rejected: the block that was full of drafts is not to be found under them."""
    space = new_space()
    row = prefill(space, tokens(6))
    space.append([row], tokens(5, first=6), [5], num_draft=5)
    run_step(space)
    assert hit(space, tokens(12)) == 4
    space.truncate([row], [8])
    assert hit(space, tokens(12)) == 8
    space.append([row], [50], [1])
    assert space.num_tokens(row) == 9


def test_promise_11_drafts_are_accepted_by_the_next_append() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.append([row], [6, 7], [2], num_draft=2)
    run_step(space)
    assert hit(space, tokens(9)) == 4
    space.append([row], [8])
    assert hit(space, tokens(9)) == 8


def test_promise_11_the_certain_token_before_drafts_is_published() -> None:
    """Of the two tokens one is sampled and completes the block, the other is a guess."""
    space = new_space()
    row = prefill(space, tokens(7))
    space.append([row], [7, 8], [2], num_draft=1)
    run_step(space)
    assert hit(space, tokens(9)) == 8


def test_promise_11_reserving_slots_accepts_no_drafts() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.append([row], [6, 7], [2], num_draft=2)
    space.append([row], [], [0], num_lookahead=4)
    assert hit(space, tokens(9)) == 4


def test_promise_11_a_published_block_that_is_rolled_back_into_loses_its_name() -> None:
    space = new_space()
    row = prefill(space, tokens(8))
    space.truncate([row], [6])
    assert hit(space, tokens(9)) == 4
    space.append([row], [60, 70], [2])
    assert hit(space, tokens(9)) == 4
    assert hit(space, [*range(6), 60, 70, 0]) == 8
    space.check()


def test_promise_11_a_roll_back_while_its_step_is_in_flight() -> None:
    """The step still writes the rejected slots: their block waits, and what is accepted counts as computed."""
    space = new_space()
    row = prefill(space, tokens(4))
    space.append([row], tokens(5, first=4), [5], num_draft=5)
    plan = space.plan_step()
    rejected = space.block_ids(row)[2]
    space.truncate([row], [8])
    assert place(space, rejected) == "deferred"
    acknowledge(space, plan)
    assert place(space, rejected) == "free"
    assert len(space.computed_block_ids(row)) == 2


# 12. Deferred free


@pytest.mark.interpreted
def test_promise_12_a_block_returns_when_the_steps_that_may_use_it_are_acknowledged() -> None:
    """Two steps in flight: what is freed waits for the second, though the first is acknowledged."""
    space = new_space()
    row = allocate(space, tokens(7))
    first = space.plan_step()
    space.append([row], [7])
    second = space.plan_step()
    blocks = space.block_ids(row)
    space.free(row)
    assert [place(space, block) for block in blocks] == ["deferred", "deferred"]
    acknowledge(space, first)
    assert [place(space, block) for block in blocks] == ["deferred", "deferred"]
    acknowledge(space, second)
    assert [place(space, block) for block in blocks] == ["free", "free"]


@pytest.mark.interpreted
def test_promise_12_in_order() -> None:
    space = new_space()
    rows = [allocate(space, tokens(3, first=100 * index)) for index in range(2)]
    blocks = [space.block_ids(row)[0] for row in rows]
    first = space.plan_step()
    space.free(rows[0])
    second = space.plan_step()
    space.free(rows[1])
    acknowledge(space, first)
    assert [place(space, block) for block in blocks] == ["free", "deferred"]
    acknowledge(space, second)
    assert [place(space, block) for block in blocks] == ["free", "free"]


def test_promise_12_deferred_blocks_are_not_handed_out() -> None:
    space = new_space(num_blocks=5)
    row = allocate(space, tokens(12))
    blocks = set(space.block_ids(row))
    plan = space.plan_step()
    space.free(row)
    assert space.can_allocate(tokens(8, first=100)) is LATER
    newcomer = allocate(space, tokens(4, first=100))
    assert not blocks & set(space.block_ids(newcomer))
    acknowledge(space, plan)
    assert space.can_allocate(tokens(8, first=200)) is OK


def test_promise_12_a_deferred_block_can_be_hit() -> None:
    """Steps run in order, so that a later one may read what an earlier one writes."""
    space = new_space()
    row = allocate(space, tokens(9))
    blocks = space.block_ids(row)
    plan = space.plan_step()
    space.free(row)
    other = allocate(space, tokens(9))
    assert space.block_ids(other)[:2] == blocks[:2]
    acknowledge(space, plan)
    assert place(space, blocks[0]) == "in use"
    space.check()


def test_promise_12_without_a_step_in_flight_nothing_waits() -> None:
    space = new_space()
    row = prefill(space, tokens(9))
    space.free(row)
    (pool,) = space.statistics().pools
    assert (pool.num_deferred, pool.num_free) == (0, 100)


def test_promise_12_the_source_of_a_copy_waits_for_the_copy() -> None:
    """Both sharers are gone before the plan is even made: it still copies from there."""
    space = new_space()
    row = prefill(space, tokens(6))
    (child,) = space.fork(row)
    source = space.block_ids(row)[1]
    space.append([child], [6])
    space.free([row])
    assert place(space, source) == "deferred"
    plan = space.plan_step()
    assert pairs(plan.copies)[0][0] == source
    acknowledge(space, plan)
    assert place(space, source) == "free"


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
    assert space.can_swap_in(rows[:1]) is OK
    allocate(space, tokens(4, first=300))
    assert space.can_swap_in(rows[:1]) is LATER  # three free blocks, of which the watermark keeps one


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
