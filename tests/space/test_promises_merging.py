"""Duplicates: a block is replaced by the one that carries its name only where it is that block, with that content."""

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, RequestKeys
from tests.space.spaces import acknowledge, allocate, hit, new_space, prefill, run_step, tokens


def with_duplicate(space: BlockSpace) -> tuple[int, int]:
    """A computed row, and one that has written the same first block and two tokens more, in the open step."""
    carrier = prefill(space, tokens(6))
    row = allocate(space, tokens(3))
    space.append(row, [3, 4, 5], [3])
    assert space.block_ids(row)[0] != space.block_ids(carrier)[0]
    return carrier, row


@pytest.mark.interpreted
def test_promise_07_a_duplicate_that_was_rolled_back_and_holds_other_tokens_is_not_merged() -> None:
    space = new_space()
    carrier, row = with_duplicate(space)
    space.truncate(row, [2])
    space.append(row, [77])
    before = space.block_ids(row)
    run_step(space)
    assert space.block_ids(row) == before
    assert before[0] not in space.block_ids(carrier)
    space.check()


@pytest.mark.interpreted
def test_promise_07_merging_leaves_rows_on_the_host_alone() -> None:
    """Their tables hold blocks of the host, which may have the duplicate's number."""
    space = new_space(num_host_blocks=10)
    row = allocate(space, [0])
    away = allocate(space, tokens(6, first=50))
    prefill(space, tokens(6))
    assert space.swap_out(away)
    assert space.block_ids(away)[0] == space.block_ids(row)[0]
    on_host = space.block_ids(away)
    space.append(row, [1, 2, 3, 4], [4])
    duplicate = space.block_ids(row)[0]
    run_step(space)
    assert space.block_ids(row)[0] != duplicate
    assert space.block_ids(away) == on_host
    space.check()


@pytest.mark.interpreted
def test_promise_07_forks_of_a_row_that_has_left_are_merged() -> None:
    """They hold the duplicate that it published."""
    space = new_space()
    carrier, row = with_duplicate(space)
    (child,) = space.fork(row)
    space.free(row)
    run_step(space)
    assert space.block_ids(child)[0] == space.block_ids(carrier)[0]
    space.check()


def test_promise_09_what_a_failed_step_was_to_merge_is_merged_later() -> None:
    """The row was declared computed, so it is not rewound, and does not publish its block again."""
    space = new_space()
    carrier, row = with_duplicate(space)
    plan = space.plan_step()
    space.mark_computed(row)
    assert space.abort(plan.step_id).rewound_rows == ()
    run_step(space)
    assert space.block_ids(row)[0] == space.block_ids(carrier)[0]


def test_promise_07_a_carrier_behind_content_that_is_gone_gives_its_name_up() -> None:
    """The block before it was evicted, and written again into the same block: a new life, which nothing follows yet."""
    space = new_space(num_blocks=5)
    first, filler = prefill(space, tokens(4)), prefill(space, tokens(3, first=90))
    row = allocate(space, tokens(3))
    space.append(row, tokens(5, first=3), [5])
    (head,) = space.block_ids(first)
    plan = space.plan_step()
    space.free(first)
    space.free(allocate(space, tokens(3, first=50)))
    last = allocate(space, tokens(4))
    assert space.block_ids(last) == [head]
    space.free(filler)
    space.append(last, tokens(4, first=4), [4])
    acknowledge(space, plan)
    run_step(space)
    assert hit(space, tokens(9)) == 8
    space.check()


@pytest.mark.interpreted
def test_promise_07_a_duplicate_is_not_merged_into_what_its_carrier_holds_now() -> None:
    """The carrier was evicted while the duplicate's step was in flight, and another sequence has named it since."""
    space = new_space(num_blocks=4)
    first = prefill(space, tokens(4))
    row = allocate(space, tokens(3))
    space.append(row, [3, 4], [2])
    before = space.block_ids(row)
    plan = space.plan_step()
    carrier = space.block_ids(first)
    space.free(first)
    other = allocate(space, tokens(4, first=50))
    assert space.block_ids(other) == carrier
    acknowledge(space, plan)
    run_step(space)
    assert space.block_ids(row) == before
    assert hit(space, tokens(5)) == 4
    space.check()


@pytest.mark.interpreted
def test_promise_08_a_forged_digest_does_not_merge_blocks_of_different_keys() -> None:
    """Equal tokens, and one digest brought for both; the keys show that their content differs."""
    space = new_space()
    rows = []
    for salt in (b"mine", b"yours"):
        keys = RequestKeys(salt=salt)
        allocation = space.allocate(tokens(6), keys=keys, digests=np.ones((1, 32), np.uint8))
        assert isinstance(allocation, Allocation)
        rows.append(allocation.row)
    run_step(space)
    mine, yours = (space.block_ids(row) for row in rows)
    assert set(mine).isdisjoint(yours)
    space.check()


@pytest.mark.interpreted
def test_promise_07_what_follows_a_duplicate_after_a_rollback_is_found_behind_its_carrier() -> None:
    """A row continues after a block that is still a duplicate, with content that other rows have a block of already."""
    space = new_space()
    carrier, row = with_duplicate(space)
    space.append(carrier, [6, 7], [2])
    space.append(row, [50], [1])
    plan = space.plan_step()
    space.truncate(row, [4])
    space.append(row, [4, 5, 6, 7], [4])
    acknowledge(space, plan)
    run_step(space)
    assert hit(space, tokens(9)) == 8
    assert space.block_ids(row) == space.block_ids(carrier)
    space.check()


@pytest.mark.interpreted
def test_promise_07_a_block_behind_a_parent_that_is_gone_takes_no_name_away() -> None:
    """The carrier that a row continues was evicted and holds other content under a name: another's block is found."""
    space = new_space(num_blocks=9)
    first = prefill(space, tokens(4))
    row = allocate(space, tokens(3))
    space.append(row, [3])
    (carrier,) = space.block_ids(first)
    plan = space.plan_step()
    space.free(first)
    fillers = [allocate(space, tokens(1, first=200 + place)) for place in range(space.num_free_blocks() - 1)]
    assert space.block_ids(allocate(space, tokens(4, first=50))) == [carrier]
    space.free(fillers)
    allocate(space, tokens(9))
    assert hit(space, tokens(9)) == 8
    space.append(row, tokens(4, first=4), [4])
    assert hit(space, tokens(9)) == 8
    acknowledge(space, plan)
    space.check()


@pytest.mark.interpreted
def test_promise_07_a_duplicate_that_was_handed_out_again_is_not_merged() -> None:
    """Steps run in order, so the block of a row that was freed is allocated to another at once, with other tokens."""
    space = new_space(in_order=True)
    carrier, row = with_duplicate(space)
    duplicate = space.block_ids(row)[0]
    plan = space.plan_step()
    space.free(row)
    other = allocate(space, tokens(3, first=90))
    while duplicate not in space.block_ids(other):
        other = allocate(space, tokens(3, first=90))
    assert space.block_ids(other) == [duplicate]
    acknowledge(space, plan)
    run_step(space)  # the other's tokens are computed now, which merging would have waited for
    assert space.block_ids(other) == [duplicate]
    assert duplicate not in space.block_ids(carrier)
    space.check()
