"""The manager's promises about time (docs/design.md, Promises: 11 to 13), each by direct examples."""

import numpy as np
import pytest

from pagedkv import AllocStatus, FullAttention, GroupSpec, RecurrentState, Shortage, SlidingWindow
from tests.space.spaces import (
    acknowledge,
    allocate,
    hit,
    new_space,
    only_pool,
    pairs,
    place,
    prefill,
    run_step,
    tokens,
    unchanged,
)

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


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
def test_promise_11_two_forks_do_not_reserve_the_same_slots() -> None:
    """Reserving slots in a shared, partly filled block copies it, as writing does; the last to hold it keeps it."""
    space = new_space()
    row = prefill(space, tokens(6))
    children = space.fork(row, 2).tolist()
    shared = space.block_ids(row)
    assert space.append_with_copies([row, *children], [], [0] * 3, num_lookahead=3) == [
        (shared[1], space.block_ids(row)[1]),
        (shared[1], space.block_ids(children[0])[1]),
    ]
    tails = [space.block_ids(holder)[1:] for holder in (row, *children)]
    assert len({block for tail in tails for block in tail}) == 6
    assert space.block_ids(children[1])[:2] == shared
    space.check()


@pytest.mark.interpreted
def test_promise_11_a_fork_of_a_row_with_reserved_slots_reserves_its_own() -> None:
    space = new_space()
    row = allocate(space, tokens(6), num_lookahead=3)
    run_step(space)
    (child,) = space.fork(row).tolist()
    assert space.append_with_copies([child], [], [0], num_lookahead=3) == [
        (space.block_ids(row)[1], space.block_ids(child)[1])
    ]
    assert len({*space.block_ids(row)[1:], *space.block_ids(child)[1:]}) == 4
    assert space.append_with_copies([row, child], [], [0, 0], num_lookahead=3) == []


def test_promise_11_whoever_copies_to_reserve_computes_what_is_pending_in_the_copy() -> None:
    """The copy is made before the forward pass: tokens that were not computed before are computed in both blocks."""
    space = new_space()
    row = allocate(space, tokens(6))
    (child,) = space.fork(row).tolist()
    space.append([child], [], [0], num_lookahead=1)
    compute = run_step(space).compute
    assert dict(zip(compute.rows.tolist(), compute.starts.tolist(), strict=True)) == {row: 0, child: 4}


def test_promise_11_a_recurrent_state_reserves_nothing_and_is_not_copied_for_it() -> None:
    space = new_space(RecurrentState(4, pool="device"))
    row = prefill(space, tokens(6))
    (child,) = space.fork(row).tolist()
    assert space.append_with_copies([row, child], [], [0, 0], num_lookahead=3) == []
    assert space.block_ids(row) == space.block_ids(child)


@pytest.mark.interpreted
@pytest.mark.parametrize("num_writers", range(1, 5))
@pytest.mark.parametrize(("count", "num_lookahead"), [(1, 0), (0, 1), (1, 3)])
def test_promise_03_copies_of_several_sharers_are_counted_exactly(
    num_writers: int, count: int, num_lookahead: int
) -> None:
    """Two families of four share a block each; of a family that writes as a whole one keeps the original."""
    space = new_space(num_blocks=24)
    families = []
    for first in (0, 100):
        row = prefill(space, tokens(6, first))
        families.append([row, *space.fork(row, 3).tolist()])
    batch = [row for family in families for row in family[:num_writers]]
    num_needed = 2 * min(num_writers, 3) + len(batch) * (6 + count + num_lookahead > 8)
    counts = [count] * len(batch)
    prefill(space, tokens(4 * (space.num_free_blocks() - num_needed), first=1000))
    with unchanged(space):
        assert space.can_append(batch, counts, num_lookahead=num_lookahead)
    prefill(space, [0])
    with unchanged(space):
        assert not space.can_append(batch, counts, num_lookahead=num_lookahead)
        answer = space.append(batch, [7] * (count * len(batch)), counts, num_lookahead=num_lookahead)
        assert answer == Shortage("device", num_needed, num_needed - 1)


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


def test_promise_11_a_window_does_not_slide_over_what_a_step_in_flight_computed_and_lost() -> None:
    """Rolled back and grown again, the tokens behind the cut are to be computed: the step in flight does not count."""
    space = new_space(SlidingWindow(4, 2))
    row, other = prefill(space, tokens(4)), prefill(space, tokens(4, first=100))
    space.append([row, other], tokens(32), [16, 16])
    plan = space.plan_step()
    space.truncate([row], [10])
    space.append([row], tokens(10, first=200), [10])
    acknowledge(space, plan)
    assert [bool(block) for block in space.block_ids(row)] == [False] * 3 + [True] * 7
    assert [bool(block) for block in space.block_ids(other)] == [False] * 8 + [True] * 2
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(12, 2))], ids=["one", "two"])
def test_promise_11_a_batch_is_rolled_back_as_its_rows_one_by_one(groups: tuple[GroupSpec, ...]) -> None:
    """Some rows lose tokens, names or reserved slots, some accept their drafts; each ends as it would alone."""
    together, alone = new_space(*groups, num_blocks=301), new_space(*groups, num_blocks=301)
    lengths = np.arange(9, 18)
    for space in (together, alone):
        rows = [prefill(space, tokens(12, first=100 * index)) for index in range(9)]
        assert space.append(rows, tokens(45), [5] * 9, num_draft=4, num_lookahead=6) is None
        if space is together:
            space.truncate(rows, lengths)
        else:
            for row, length in zip(rows, lengths.tolist(), strict=True):
                space.truncate([row], [length])
        run_step(space)
        space.check()
    assert together.lengths(rows).tolist() == lengths.tolist()
    assert together.statistics() == alone.statistics()
    for index, length in enumerate(lengths.tolist()):
        assert len(together.block_ids(index)) == len(alone.block_ids(index)) == -(-length // 4)
        known = [*tokens(12, first=100 * index), *tokens(5, first=5 * index)][:length]
        assert hit(together, [*known, -1]) == hit(alone, [*known, -1]) == length // 4 * 4


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
    space.append(rows[1], [7])
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


@pytest.mark.interpreted
@pytest.mark.parametrize("give_up", ["free", "truncate"])
def test_promise_12_a_block_that_a_plan_hands_out_waits_for_that_plan(give_up: str) -> None:
    """It may be cleared when the plan is carried out, whether or not its row computes anything there."""
    space = new_space(num_blocks=4)
    row = prefill(space, tokens(4))
    space.append(row, [], [0], num_lookahead=4)
    plan = space.plan_step()
    (new,) = plan.new_blocks
    if give_up == "free":
        space.free(row)
    else:
        space.truncate(row, [4])
    block = int(new.block_ids[0])
    assert only_pool(space).block(block).place == "deferred"
    space.acknowledge(plan.step_id)
    assert only_pool(space).block(block).place == "free"
    space.check()
