"""Moves between device and host: twins, what steps in flight still use, and what a move makes undefined or certain."""

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import Allocation, AllocStatus, BlockSpace, RequestKeys, Shortage, TenantLimits
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import StepError
from tests.space.spaces import acknowledge, allocate, new_space, only_pool, prefill, run_step, tokens, unchanged


def swapped_in(space: BlockSpace, length: int) -> int:
    """A computed row that the open plan brings back from the host."""
    row = prefill(space, tokens(length))
    assert space.swap_out(row)
    run_step(space)
    space.reset_prefix_cache()
    assert space.swap_in(row)
    return row


@pytest.mark.interpreted
def test_promise_13_what_a_step_is_still_to_compute_is_no_twin() -> None:
    """Should that step fail, the row that was swapped in keeps its content."""
    space = new_space(num_blocks=5, num_host_blocks=4)
    row = prefill(space, tokens(9))
    assert space.swap_out(row)
    run_step(space)
    space.free(prefill(space, tokens(16, first=50)))
    other = allocate(space, tokens(4))
    assert space.swap_in(row)
    assert space.block_ids(row)[0] != space.block_ids(other)[0]
    space.check()


def test_promise_13_a_twin_by_a_forged_digest_in_another_chain_is_none() -> None:
    """The last blocks have equal tokens and one digest, but the blocks before them differ."""
    space = new_space(num_host_blocks=20)
    host_blocks = []
    for prompt, names in (([1] * 4 + [9] * 4, (1, 9)), ([2] * 4, (2,)), ([2] * 4 + [9] * 4, (2, 9))):
        digests = np.repeat(np.array(names, np.uint8)[:, None], 32, axis=1)
        allocation = space.allocate([*prompt, 0], digests=digests)
        assert isinstance(allocation, Allocation)
        run_step(space)
        assert space.swap_out(allocation.row)
        run_step(space)
        host_blocks.append(space.block_ids(allocation.row))
    first, head, second = host_blocks
    assert second[0] == head[0]
    assert second[1] != first[1]


@pytest.mark.interpreted
def test_promise_13_a_free_twin_of_two_blocks_is_counted_once() -> None:
    """Duplicates that were swapped out before they were merged: one block on the device is the twin of both."""
    space = new_space(num_blocks=3, num_host_blocks=3)
    rows = [allocate(space, [0]) for _ in range(2)]
    space.append(rows, [1, 2, 3, 1, 2, 3], [3, 3])
    plan = space.plan_step()
    assert space.swap_out(rows)
    acknowledge(space, plan)
    run_step(space)
    prefill(space, tokens(3, first=50))
    assert space.num_free_blocks() == space.num_cached_blocks() == 1
    assert space.can_swap_in(rows, [0, 0]) is AllocStatus.OK
    assert space.swap_in(rows) == ()
    assert space.block_ids(rows[0]) == space.block_ids(rows[1])
    space.check()


def duplicates(space: BlockSpace) -> list[int]:
    """Two rows that write one block alike in the open step, each its own."""
    rows = [allocate(space, [0]) for _ in range(2)]
    space.append(rows, [1, 2, 3, 1, 2, 3], [3, 3])
    return rows


@pytest.mark.interpreted
def test_promise_02_what_the_host_can_take_by_what_it_shares_is_not_said_to_be_impossible() -> None:
    """Of two duplicates the host has the content: empty, its one block would be too few."""
    space = new_space(num_host_blocks=2)
    before = prefill(space, tokens(4))
    assert space.swap_out(before)
    run_step(space)
    space.free(before)
    rows = duplicates(space)
    space.mark_computed(rows)
    assert space.block_ids(rows[0]) != space.block_ids(rows[1])
    assert space.can_swap_out(rows) is AllocStatus.OK
    assert space.swap_out(rows) == ()
    space.check()


@pytest.mark.interpreted
def test_promise_02_what_not_even_an_empty_host_could_take_is_impossible() -> None:
    space = new_space(num_host_blocks=2)
    rows = duplicates(space)
    space.mark_computed(rows)
    assert space.can_swap_out(rows) is AllocStatus.NEVER
    with unchanged(space):
        assert isinstance(space.swap_out(rows), Shortage)
    run_step(space)
    assert space.can_swap_out(rows) is AllocStatus.OK, "they are merged"


@pytest.mark.interpreted
@pytest.mark.parametrize("num_blocks", [4, 5])
def test_promise_02_what_the_device_can_take_by_what_it_shares_is_not_said_to_be_impossible(num_blocks: int) -> None:
    """Both blocks have one twin; the blocks that they write next, and each its own, would be too many for 3 or 4."""
    space = new_space(num_blocks=num_blocks, num_host_blocks=3)
    rows = duplicates(space)
    plan = space.plan_step()
    assert space.swap_out(rows)
    acknowledge(space, plan)
    run_step(space)
    next_counts = [1, 1 + 4 * (num_blocks - 4)]
    blocker = prefill(space, tokens(4, first=50))
    assert space.can_swap_in(rows, next_counts) is AllocStatus.LATER
    space.free(blocker)
    assert space.can_swap_in(rows, next_counts) is AllocStatus.OK
    assert space.can_swap_in(rows, [5, 5 * (num_blocks - 3)]) is AllocStatus.NEVER
    assert space.swap_in(rows) == ()
    assert space.can_append(rows, next_counts)
    space.check()


@pytest.mark.interpreted
def test_promise_02_what_another_tenant_pays_for_counts_in_no_cap() -> None:
    """Of five blocks two are shared with a row of another tenant; the cap is three."""
    space = new_space(num_host_blocks=20, tenants={"small": TenantLimits(cap=3), "large": TenantLimits()})
    admitted = space.allocate(tokens(9), tenant="small")
    assert isinstance(admitted, Allocation)
    run_step(space)
    assert space.swap_out(admitted.row)
    run_step(space)
    assert isinstance(space.allocate(tokens(12), tenant="large"), Allocation)
    run_step(space)
    assert space.can_swap_in(admitted.row, [8]) is AllocStatus.OK
    filler = space.allocate(tokens(4, first=50), tenant="small")
    assert isinstance(filler, Allocation)
    assert space.can_swap_in(admitted.row, [8]) is AllocStatus.LATER
    assert space.can_swap_in(admitted.row, [12]) is AllocStatus.NEVER
    space.free(filler.row)
    assert space.swap_in(admitted.row)
    assert space.can_append([admitted.row], [8])
    space.check()


@pytest.mark.interpreted
def test_promise_01_what_fits_by_what_it_shares_is_for_later() -> None:
    """Five blocks are too many for the cap; four of them are charged to another tenant, whose rows still use them."""
    space = new_space(tenants={"small": TenantLimits(cap=3), "large": TenantLimits()})
    assert isinstance(space.allocate(tokens(16), tenant="large"), Allocation)
    run_step(space)
    filler = space.allocate(tokens(12, first=50), tenant="small")
    assert isinstance(filler, Allocation)
    run_step(space)
    assert space.can_allocate(tokens(20), tenant="small") is AllocStatus.LATER
    assert space.can_allocate(tokens(40), tenant="small") is AllocStatus.NEVER
    space.free(filler.row)
    assert space.can_allocate(tokens(20), tenant="small") is AllocStatus.OK


@pytest.mark.interpreted
def test_promise_12_a_block_whose_twin_is_on_the_host_waits_for_the_steps_that_read_it() -> None:
    """It is not moved, so no move holds it."""
    space = new_space(num_host_blocks=10)
    assert space.swap_out(prefill(space, tokens(5)))
    run_step(space)
    row = prefill(space, tokens(5))
    space.append(row, [7])
    plan = space.plan_step()
    shared = space.block_ids(row)[0]
    moves = space.swap_out(row)
    assert not isinstance(moves, Shortage)
    assert shared not in [block for move in moves for block in move.src_ids.tolist()]
    assert only_pool(space).block(shared).place == "deferred"
    acknowledge(space, plan)
    assert only_pool(space).block(shared).place == "free"
    space.check()


@pytest.mark.interpreted
def test_promise_09_a_copy_of_what_a_failed_plan_was_to_bring_is_lost() -> None:
    """The open plan would copy what never came."""
    space = new_space(num_host_blocks=10)
    row = swapped_in(space, 3)
    plan = space.plan_step()
    (child,) = space.fork(row).tolist()
    space.append(child, [3])
    assert set(space.block_ids(child)).isdisjoint(space.block_ids(row))
    assert space.abort(plan.step_id).lost_rows == (row, child)
    space.check()


@pytest.mark.interpreted
def test_promise_09_what_a_plan_in_flight_brings_cannot_be_declared_computed() -> None:
    space = new_space(num_host_blocks=10)
    row = swapped_in(space, 6)
    plan = space.plan_step()
    with unchanged(space), pytest.raises(StepError, match="copies or swaps its block"):
        space.mark_computed(row)
    acknowledge(space, plan)
    space.mark_computed(row)


@pytest.mark.interpreted
def test_promise_09_what_is_written_ahead_of_a_copy_cannot_be_declared_computed() -> None:
    """The open plan copies the block first; its row has a new token in it."""
    space = new_space()
    row = prefill(space, tokens(6))
    (child,) = space.fork(row).tolist()
    space.append(child, [6])
    space.append(row, [7])
    with unchanged(space), pytest.raises(StepError, match="copies or swaps its block"):
        space.mark_computed(row)
    run_step(space)
    space.mark_computed(row)


# Twins: content on the other side that is the same in every respect, or none


def forged(*names: int) -> npt.NDArray[np.uint8]:
    """Digests that a caller brings, a number for each block."""
    return np.repeat(np.array(names, np.uint8)[:, None], 32, axis=1)


def swapped_to(
    space: BlockSpace, token_ids: list[int], names: tuple[int, ...], keys: RequestKeys = NO_KEYS
) -> list[int]:
    """Compute a prompt under these digests, hitting nothing, and swap it out; return its host blocks."""
    digests = forged(*names)
    none = space.match(token_ids, digests=digests, keys=keys, max_hit_tokens=0)
    allocation = space.allocate(token_ids, digests=digests, keys=keys, match=none)
    assert isinstance(allocation, Allocation)
    run_step(space)
    assert not isinstance(space.swap_out(allocation.row), Shortage)
    run_step(space)
    space.check()
    return space.block_ids(allocation.row)


def test_promise_13_equal_content_is_one_twin() -> None:
    """What the tests below would find if the content were the same."""
    space = new_space(num_host_blocks=20)
    first, second = (swapped_to(space, [1, 2, 3, 4, 5, 6, 7, 8, 9], (1, 2)) for _ in range(2))
    assert [here == there for here, there in zip(first, second, strict=True)] == [True, True, False]


def test_promise_13_content_under_another_salt_is_no_twin_whatever_its_digest() -> None:
    space = new_space(num_host_blocks=20)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    ours, theirs = (swapped_to(space, prompt, (1, 2), RequestKeys(salt=salt)) for salt in (b"ours", b"theirs"))
    assert not set(ours) & set(theirs)


@pytest.mark.parametrize("place", [0, 3, 4, 7])
def test_promise_13_content_with_another_token_is_no_twin_whatever_its_digest(place: int) -> None:
    space = new_space(num_host_blocks=20)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    other = [*prompt[:place], 99, *prompt[place + 1 :]]
    first, second = swapped_to(space, prompt, (1, 2)), swapped_to(space, other, (1, 2))
    assert (first[0] == second[0], first[1] == second[1]) == (place >= 4, False)


def test_promise_13_a_block_behind_one_without_a_twin_has_none() -> None:
    """Its digest and tokens are those of a first block, which is a beginning, and no continuation of anything."""
    space = new_space(num_host_blocks=20)
    beginning = swapped_to(space, [7, 7, 7, 7, 0], (7,))
    behind = swapped_to(space, [1, 1, 1, 1, 7, 7, 7, 7, 0], (1, 7))
    assert beginning[0] not in behind


def test_promise_28_content_of_other_weights_is_no_twin() -> None:
    """Names on the host survive an epoch within the lag, and rows of the next epoch compute the same tokens anew."""
    space = new_space(num_host_blocks=20, weights_epoch=1, max_epoch_lag=1)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    before = swapped_to(space, prompt, (1, 2))
    space.set_weights_epoch(2)
    after = swapped_to(space, prompt, (1, 2))
    assert not set(before) & set(after)
    assert not set(after[:2]) & set(swapped_to(space, [5], ()))


@pytest.mark.interpreted
def test_promise_09_what_a_step_in_flight_computes_gets_no_twin_on_the_host() -> None:
    """Should the step fail, the row must not share what others rely on."""
    space = new_space(num_host_blocks=20)
    prompt = list(range(9))
    known = prefill(space, prompt)
    assert not isinstance(space.swap_out(known), Shortage)
    run_step(space)
    allocation = space.allocate(prompt, match=space.match(prompt, max_hit_tokens=0))
    assert isinstance(allocation, Allocation)
    plan = space.plan_step()
    moves = space.swap_out(allocation.row)
    assert not isinstance(moves, Shortage)
    assert [len(move.src_ids) for move in moves] == [3], "all of it is copied"
    assert not set(space.block_ids(allocation.row)) & set(space.block_ids(known))
    space.check()
    acknowledge(space, plan)
    run_step(space)
    space.check()


@pytest.mark.interpreted
def test_promise_13_what_is_not_full_gets_no_twin_by_what_stood_in_its_block_before() -> None:
    """A block's digest and tokens outlive its content until they are overwritten."""
    space = new_space(num_blocks=4, num_host_blocks=20)
    whole = prefill(space, [1, 2, 3, 4, 5])
    (block, _) = space.block_ids(whole)
    assert not isinstance(space.swap_out(whole), Shortage)
    run_step(space)
    others = [prefill(space, [50 + number]) for number in range(3)]
    space.free([row for row in others if space.block_ids(row) == [block]])
    part = prefill(space, [1, 2])
    assert space.block_ids(part) == [block]
    moves = space.swap_out(part)
    assert not isinstance(moves, Shortage)
    assert [move.src_ids.tolist() for move in moves] == [[block]]
    assert space.block_ids(part)[0] not in space.block_ids(whole)
    run_step(space)
    space.check()
