"""The manager's promises about sharing (docs/design.md, Promises: 6 to 10), each by direct examples."""

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import (
    BlockSpace,
    FullAttention,
    GroupSpec,
    SlidingWindow,
    hash_request_tokens,
)
from pagedkv.contract.keys import NO_KEYS
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    computed_by,
    copies_of,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
)

# 6. Fork and copy on write


@pytest.mark.interpreted
def test_promise_06_fork_shares_every_block_and_copies_nothing() -> None:
    space = new_space()
    row = prefill(space, tokens(10))
    before = space.num_free_blocks()
    children = space.fork(row, 3).tolist()
    assert [space.block_ids(child) for child in children] == [space.block_ids(row)] * 3
    assert space.num_free_blocks() == before
    assert run_step(space).copies == ()


@pytest.mark.interpreted
def test_promise_06_the_first_write_copies_the_partly_filled_block_alone() -> None:
    space = new_space()
    row = prefill(space, tokens(10))
    (child,) = space.fork(row)
    before = space.block_ids(row)
    space.append([child], [10])
    after = space.block_ids(child)
    assert after[:2] == before[:2]
    assert after[2] != before[2]
    assert space.block_ids(row) == before
    assert copies_of(space.plan_step()) == [(before[2], after[2])]


def test_promise_06_the_last_to_write_keeps_the_block() -> None:
    space = new_space()
    row = prefill(space, tokens(10))
    (child,) = space.fork(row)
    space.append([child, row], [10, 11])
    assert len(copies_of(space.plan_step())) == 1


def test_promise_06_on_a_block_boundary_nothing_is_copied() -> None:
    space = new_space()
    row = prefill(space, tokens(8))
    (child,) = space.fork(row)
    space.append([row, child], [8, 9])
    assert run_step(space).copies == ()
    assert space.block_ids(row)[:2] == space.block_ids(child)[:2]
    assert space.block_ids(row)[2] != space.block_ids(child)[2]


def test_promise_06_copies_of_one_plan_do_not_depend_on_each_other() -> None:
    """A fork of a fork in one step: its copy comes from the origin, and it computes the token between itself."""
    space = new_space()
    row = prefill(space, tokens(6))
    (child,) = space.fork(row)
    space.append([child], [6])
    (grandchild,) = space.fork(child)
    space.append([grandchild], [7])
    origin, first, second = (space.block_ids(each)[1] for each in (row, child, grandchild))
    plan = space.plan_step()
    assert copies_of(plan) == [(origin, first), (origin, second)]
    assert computed_by(plan) == {child: (6, 7), grandchild: (6, 8)}


def test_promise_06_parallel_sampling() -> None:
    """Four samples of one prompt: it is held once, however long the samples get."""
    space = new_space()
    rows = [allocate(space, tokens(10))]
    rows += space.fork(rows[0], 3).tolist()
    assert computed_by(run_step(space)) == {rows[0]: (0, 10)}
    for step in range(10):
        space.append(rows, [100 * row + step for row in rows])
        run_step(space)
        space.check()
    tables = [space.block_ids(row) for row in rows]
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert len({block for table in tables for block in table[2:]}) == 4 * 3
    space.free(rows)
    (pool,) = space.statistics().pools
    assert pool.num_in_use == 0


@pytest.mark.interpreted
def test_promise_06_beam_search() -> None:
    """Fork, drop and reorder each step: blocks are held by the living beams alone."""
    space = new_space()
    rng = np.random.default_rng(1)
    beams = [prefill(space, tokens(5))]
    for step in range(20):
        parents = sorted(rng.integers(0, len(beams), 3).tolist())
        children = [int(space.fork(beams[parent])[0]) for parent in parents]
        space.free(beams)
        beams = children
        assert space.append(beams, [1000 * step + beam for beam in beams]) is None
        run_step(space)
        space.check()
    assert {space.num_tokens(beam) for beam in beams} == {25}
    (pool,) = space.statistics().pools
    assert pool.num_in_use == len({block for beam in beams for block in space.block_ids(beam)})


# 7. Prefix caching


@pytest.mark.interpreted
@pytest.mark.parametrize("finished", [False, True], ids=["live", "finished"])
def test_promise_07_full_blocks_are_shared_with_live_and_finished_sequences(finished: bool) -> None:  # noqa: FBT001
    space = new_space()
    row = prefill(space, tokens(10))
    blocks = space.block_ids(row)
    if finished:
        space.free(row)
    other = space.allocate([*range(8), 50, 51, 52])
    assert getattr(other, "num_hit_tokens", None) == 8
    assert space.block_ids(allocate(space, tokens(10)))[:2] == blocks[:2]


def test_promise_07_tokens_that_were_appended_are_shared_too() -> None:
    """The next turn of a conversation hits on the answer to the last one."""
    space = new_space()
    row = prefill(space, tokens(5))
    for token in range(5, 14):
        space.append([row], [token])
        run_step(space)
    space.free(row)
    assert hit(space, tokens(20)) == 12


@pytest.mark.interpreted
@pytest.mark.parametrize(("length", "num_hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 12)])
def test_promise_07_at_most_all_tokens_but_the_last_hit(length: int, num_hit: int) -> None:
    """The last one must be computed for its logits."""
    space = new_space()
    cache(space, tokens(12))
    assert space.match(tokens(length)).num_tokens == num_hit


@pytest.mark.interpreted
def test_promise_07_identical_prompts_of_one_step_share() -> None:
    """The first computes what the second only reads, in the same forward pass."""
    space = new_space()
    first, second = allocate(space, tokens(10)), allocate(space, tokens(10))
    assert space.block_ids(second)[:2] == space.block_ids(first)[:2]
    assert computed_by(space.plan_step()) == {first: (0, 10), second: (8, 10)}


def test_promise_07_who_shares_computes_when_the_computer_leaves() -> None:
    """The first of two identical prompts is freed before the step is planned: the second inherits its work."""
    space = new_space()
    first, second = allocate(space, tokens(10)), allocate(space, tokens(10))
    space.free(first)
    assert computed_by(run_step(space)) == {second: (0, 10)}
    space.check()


@pytest.mark.interpreted
def test_promise_07_twins_that_grow_alike_share_one_block_in_the_end() -> None:
    """Greedy twins: both complete the same block; one name, and after the step one block; the other is free."""
    space = new_space()
    twins = [prefill(space, tokens(6)), prefill(space, tokens(6))]
    space.append(twins, [6, 7, 6, 7], [2, 2])
    assert len({space.block_ids(twin)[1] for twin in twins}) == 2
    before = space.num_free_blocks()
    plan = space.plan_step()
    assert len({space.block_ids(twin)[1] for twin in twins}) == 2
    acknowledge(space, plan)
    assert space.block_ids(twins[0]) == space.block_ids(twins[1])
    assert space.num_free_blocks() == before + 1
    (pool,) = space.statistics().pools
    assert pool.num_named == 2
    (writes,) = run_step(space).table_writes
    assert (writes.rows.tolist(), writes.starts.tolist()) == ([twins[1]], [1])
    space.check()


def test_promise_07_a_duplicate_that_a_step_in_flight_reads_is_dropped_after_that_step() -> None:
    space = new_space()
    twins = [prefill(space, tokens(6)), prefill(space, tokens(6))]
    space.append(twins, [6, 7, 6, 7], [2, 2])
    first = space.plan_step()
    duplicate = space.block_ids(twins[1])[1]
    space.append(twins, [8, 8])
    second = space.plan_step()
    acknowledge(space, first)
    assert space.block_ids(twins[0])[1] == space.block_ids(twins[1])[1]
    assert only_pool(space).block(duplicate).place == "deferred"
    acknowledge(space, second)
    assert only_pool(space).block(duplicate).place == "free"
    space.check()


def test_promise_07_without_prefix_caching_nothing_hits() -> None:
    space = new_space(prefix_caching=False)
    prefill(space, tokens(12))
    assert hit(space, tokens(12)) == 0


# 9. Nothing unfinished is reachable


@pytest.mark.interpreted
def test_promise_09_blocks_count_as_computed_when_their_step_is_acknowledged() -> None:
    space = new_space()
    row = allocate(space, tokens(9))
    blocks = space.block_ids(row)
    assert space.computed_block_ids(row) == []
    first = space.plan_step()
    space.append([row], tokens(3, first=9), [3])
    assert space.computed_block_ids(row) == []
    acknowledge(space, first)
    assert space.computed_block_ids(row) == blocks[:2]
    run_step(space)
    assert space.computed_block_ids(row) == blocks[:3]


def test_promise_09_what_is_shared_within_a_step_is_not_computed_either() -> None:
    space = new_space()
    allocate(space, tokens(9))
    sharer = allocate(space, tokens(9))
    assert space.computed_block_ids(sharer) == []
    run_step(space)
    assert len(space.computed_block_ids(sharer)) == 2


@pytest.mark.interpreted
def test_promise_09_what_nobody_will_compute_is_withdrawn() -> None:
    """A sequence is freed before its step is planned."""
    space = new_space()
    row = allocate(space, tokens(9))
    assert hit(space, tokens(9)) == 8
    space.free(row)
    assert hit(space, tokens(9)) == 0
    space.check()


@pytest.mark.interpreted
def test_promise_09_what_a_failed_step_published_is_withdrawn() -> None:
    """Its own row computes it again in the next step; when that row goes, nothing is left to be found."""
    space = new_space()
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    aborted = space.abort(plan.step_id)
    assert (aborted.step_ids, aborted.rewound_rows, aborted.lost_rows) == ((plan.step_id,), (row,), ())
    assert space.computed_block_ids(row) == []
    again = space.plan_step()
    assert computed_by(again) == {row: (0, 9)}
    space.free(row)
    space.abort(again.step_id)
    assert hit(space, tokens(9)) == 0
    space.check()


def test_promise_09_aborting_takes_back_every_later_step() -> None:
    space = new_space()
    row = allocate(space, tokens(4))
    first = space.plan_step()
    space.append([row], [4])
    second = space.plan_step()
    aborted = space.abort(first.step_id)
    assert aborted.step_ids == (first.step_id, second.step_id)
    assert computed_by(run_step(space)) == {row: (0, 5)}
    assert len(space.computed_block_ids(row)) == 1


def test_promise_09_who_shared_what_a_failed_step_computed_is_lost() -> None:
    """It has nothing to recompute it from; it can only be freed, and leaves nothing behind."""
    space = new_space()
    computer = allocate(space, tokens(9))
    failed = space.plan_step()
    sharer = allocate(space, tokens(9))
    aborted = space.abort(failed.step_id)
    assert (aborted.rewound_rows, aborted.lost_rows) == ((computer,), (sharer,))
    space.free([sharer, computer])
    space.check()
    assert space.statistics().pools[0].num_in_use == 0


# 10. Dropping the cache

DROPS: dict[str, Callable[[BlockSpace], None]] = {
    "reset": lambda space: space.reset_prefix_cache(),
    "new weights": lambda space: space.set_weights_epoch("step-2"),
}
drops = pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS.keys())


@pytest.mark.interpreted
@drops
def test_promise_10_nothing_cached_before_is_found_again(drop: Callable[[BlockSpace], None]) -> None:
    space = new_space()
    cache(space, tokens(9))
    prefill(space, tokens(9, first=100))
    allocate(space, tokens(9, first=200))  # published by the open step
    drop(space)
    assert [hit(space, tokens(9, first=first)) for first in (0, 100, 200)] == [0, 0, 0]
    assert space.statistics().pools[0].num_named == 0
    space.check()


@drops
def test_promise_10_running_sequences_keep_their_blocks_and_publish_nothing(
    drop: Callable[[BlockSpace], None],
) -> None:
    """What they compute from now on rests on what was computed before."""
    space = new_space()
    row = prefill(space, tokens(9))
    before = space.block_ids(row)
    drop(space)
    assert space.block_ids(row) == before
    space.append([row], tokens(7, first=9), [7])
    (child,) = space.fork(row)
    space.append([child], tokens(5, first=16), [5])
    run_step(space)
    space.free([row, child])
    assert hit(space, tokens(16)) == 0


@drops
@pytest.mark.parametrize("group", [FullAttention(4), SlidingWindow(4, 4)], ids=repr)
def test_promise_10_a_block_that_was_begun_before_is_not_found_after(
    group: GroupSpec, drop: Callable[[BlockSpace], None]
) -> None:
    """Its first tokens were computed with the old weights, though it is full, and named, only now."""
    space = new_space(group)
    row = prefill(space, tokens(2))
    drop(space)
    space.append([row], tokens(8, first=2), [8])
    run_step(space)
    assert hit(space, tokens(10)) == 0


@drops
def test_promise_10_sequences_that_come_after_share_again(drop: Callable[[BlockSpace], None]) -> None:
    space = new_space()
    old = prefill(space, tokens(9))
    drop(space)
    new = prefill(space, tokens(9))
    assert hit(space, tokens(9)) == 8
    assert not set(space.block_ids(old)) & set(space.block_ids(new))


def test_promise_10_a_new_epoch_is_part_of_every_blocks_identity() -> None:
    space = new_space(weights_epoch="step-1")
    prefill(space, tokens(4, first=100))
    space.set_weights_epoch("step-2")
    row = prefill(space, tokens(5))
    assert (
        only_pool(space).block(space.block_ids(row)[0]).digest
        == hash_request_tokens(tokens(5), 4, NO_KEYS, "step-2")[0]
    )


def test_promise_10_a_step_in_flight_does_not_bring_anything_back() -> None:
    space = new_space()
    row = allocate(space, tokens(9))
    plan = space.plan_step()
    space.reset_prefix_cache()
    acknowledge(space, plan)
    space.free(row)
    assert hit(space, tokens(9)) == 0
    space.check()
