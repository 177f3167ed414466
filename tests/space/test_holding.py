"""Holds: what a reader outside keeps stays as it was, whatever becomes of the rows, until its ticket is back."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    FullAttention,
    RecurrentState,
    Shortage,
    SlidingWindow,
    SpaceConfig,
    TenantLimits,
    Ticket,
)
from pagedkv.errors import BlockError, ConfigurationError, PagedKVError, SharedPrefixError
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    held,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
    unchanged,
)


def evict_everything(space: BlockSpace) -> None:
    """Let a sequence take every block that can be had."""
    space.free(prefill(space, tokens(4 * space.num_free_blocks(), first=5000)))


def content(space: BlockSpace, block_ids: list[int]) -> npt.NDArray[np.int32]:
    return only_pool(space).arrays.tokens[block_ids].copy()


# What stays


def test_held_blocks_are_not_evicted_and_keep_their_names() -> None:
    space = new_space(num_blocks=9)
    cache(space, tokens(12))
    (blocks,) = space.match(tokens(13)).block_ids
    ticket = space.hold(blocks)
    evict_everything(space)
    assert space.num_free_blocks() == 5
    assert hit(space, tokens(13)) == 12
    space.release(ticket)
    evict_everything(space)
    assert hit(space, tokens(13)) == 0
    space.check()


def test_without_a_hold_the_same_blocks_are_evicted() -> None:
    space = new_space(num_blocks=9)
    cache(space, tokens(12))
    evict_everything(space)
    assert hit(space, tokens(13)) == 0


def test_blocks_of_a_freed_row_stay_with_what_they_hold() -> None:
    """The partly filled one too, which cannot be hit."""
    space = new_space(num_blocks=9)
    row = prefill(space, tokens(10))
    blocks = held(space, row)
    before = content(space, blocks)
    ticket = space.hold(blocks)
    space.free(row)
    evict_everything(space)
    np.testing.assert_array_equal(content(space, blocks), before)
    space.release(ticket)
    assert space.num_free_blocks() == 8
    assert hit(space, tokens(10)) == 8
    space.check()


def test_the_holder_reads_what_was_there_though_the_row_writes_on() -> None:
    """A held, partly filled block counts as shared: the next write copies it."""
    space = new_space()
    row = prefill(space, tokens(6))
    blocks = held(space, row)
    before = content(space, blocks)
    space.hold(blocks)
    assert space.append_with_copies(row, [77]) == [(blocks[1], held(space, row)[1])]
    assert held(space, row)[0] == blocks[0]
    np.testing.assert_array_equal(content(space, blocks), before)
    space.check()


def test_a_row_that_cannot_copy_a_held_block_is_told_of_the_shortage() -> None:
    space = new_space(num_blocks=3)
    row = prefill(space, tokens(6))
    ticket = space.hold(held(space, row))
    with unchanged(space):
        assert not space.can_append(row)
        assert space.append(row, [77]) == Shortage("device", 1, 0)
    space.release(ticket)
    assert space.append(row, [77]) is None


def test_rolling_back_into_held_blocks_is_refused() -> None:
    space = new_space()
    row = prefill(space, tokens(10))
    ticket = space.hold(held(space, row)[1:])
    with unchanged(space), pytest.raises(SharedPrefixError, match="other sequences or tickets hold its blocks"):
        space.truncate(row, [5])
    space.truncate(row, [10])
    space.release(ticket)
    space.truncate(row, [5])
    space.check()


def test_a_held_duplicate_stays_when_its_row_moves_to_the_block_that_has_the_name() -> None:
    space = new_space()
    rows = [allocate(space, tokens(4)), allocate(space, tokens(4))]
    plan = space.plan_step()
    duplicate = held(space, rows[1])
    assert duplicate != held(space, rows[0])
    space.hold(duplicate)
    acknowledge(space, plan)
    assert held(space, rows[1]) == held(space, rows[0])
    assert content(space, duplicate).tolist() == [[0, 1, 2, 3]]
    assert space.ref_counts()[duplicate].tolist() == [1]
    space.check()


def test_a_window_moves_on_and_leaves_held_blocks_to_their_holder() -> None:
    space = new_space(SlidingWindow(4, 4))
    row = prefill(space, tokens(8))
    blocks = held(space, row)
    space.hold(blocks)
    space.append(row, tokens(12, first=8), [12])
    run_step(space)
    assert not set(blocks) & set(held(space, row))
    assert space.ref_counts()[blocks].tolist() == [1] * len(blocks)
    space.check()


def test_a_held_state_is_not_advanced_in_place() -> None:
    space = new_space(RecurrentState(4, pool="device"))
    row = prefill(space, tokens(6))
    (state,) = held(space, row)[-1:]
    space.hold(state)
    ((source, _),) = space.append_with_copies(row, [7])  # type: ignore[misc]
    assert source == state
    run_step(space)
    assert state not in held(space, row)
    space.check()


def test_swapping_out_leaves_held_blocks_on_the_device() -> None:
    space = new_space(num_host_blocks=9)
    row = prefill(space, tokens(6))
    blocks = held(space, row)
    space.hold(blocks)
    space.swap_out(row)
    run_step(space)
    assert space.ref_counts()[blocks].tolist() == [1, 1]
    space.swap_in(row)
    run_step(space)
    assert held(space, row)[0] == blocks[0]  # its name was still there
    assert held(space, row)[1] != blocks[1]
    space.check()


def test_resetting_the_cache_takes_the_names_and_leaves_the_content() -> None:
    space = new_space(num_blocks=9)
    cache(space, tokens(12))
    (blocks,) = space.match(tokens(13)).block_ids
    before = content(space, blocks.tolist())
    ticket = space.hold(blocks)
    space.reset_prefix_cache()
    evict_everything(space)
    np.testing.assert_array_equal(content(space, blocks.tolist()), before)
    assert hit(space, tokens(13)) == 0
    space.release(ticket)
    assert space.num_free_blocks() == 8
    space.check()


def test_a_hold_is_no_hit() -> None:
    """Neither in the statistics nor for the adaptive policy."""
    space = new_space()
    cache(space, tokens(8))
    before = space.statistics().pools[0].num_hit_blocks
    space.release(space.hold(space.match(tokens(9)).block_ids[0]))
    assert space.statistics().pools[0].num_hit_blocks == before


# What is counted


def test_held_blocks_count_as_taken() -> None:
    space = new_space(num_blocks=9)
    cache(space, tokens(20))
    assert space.can_allocate(tokens(32, first=100)) is AllocStatus.OK
    ticket = space.hold(space.match(tokens(21)).block_ids[0])
    statistics = space.statistics().pools[0]
    assert (statistics.num_held, statistics.num_in_use, statistics.num_free) == (5, 5, 3)
    assert space.num_live_blocks() == 5
    with unchanged(space):
        assert space.can_allocate(tokens(32, first=100)) is AllocStatus.LATER
        assert space.allocate(tokens(32, first=100)) == Shortage("device", 8, 3)
        assert space.can_allocate(tokens(33, first=100)) is AllocStatus.NEVER
    space.release(ticket)
    assert space.statistics().pools[0].num_held == 0
    assert space.can_allocate(tokens(32, first=100)) is AllocStatus.OK


def test_a_hit_on_held_blocks_takes_no_free_block() -> None:
    space = new_space(num_blocks=4)
    cache(space, tokens(8))
    space.hold(space.match(tokens(9)).block_ids[0])
    assert space.num_free_blocks() == 1
    assert space.allocate(tokens(9)) == Allocation(0, 8)  # type: ignore[arg-type]


def test_a_block_held_by_several_tickets_is_one_block_and_waits_for_all() -> None:
    space = new_space()
    row = prefill(space, tokens(8))
    blocks = held(space, row)
    first, second = space.hold(blocks), space.hold(blocks * 2)
    assert space.ref_counts()[blocks].tolist() == [3, 3]
    assert space.statistics().pools[0].num_held == 2
    space.free(row)
    space.release(second)
    assert space.ref_counts()[blocks].tolist() == [1, 1]
    space.release(first)
    assert space.statistics().pools[0].num_in_use == 0
    space.check()


def test_of_what_a_ticket_gives_back_the_tail_is_evicted_first() -> None:
    space = new_space(num_blocks=5)
    cache(space, tokens(16))
    space.release(space.hold(space.match(tokens(17)).block_ids[0]))
    space.free(prefill(space, tokens(4, first=100)))
    assert hit(space, tokens(17)) == 12


# Steps in flight


def test_a_deferred_block_can_be_held() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    blocks = held(space, row)
    plan = space.plan_step()
    space.free(row)
    assert space.num_deferred_blocks() == 2
    ticket = space.hold(blocks)
    assert space.num_deferred_blocks() == 0
    acknowledge(space, plan)
    assert space.statistics().pools[0].num_in_use == 2
    space.release(ticket)
    space.check()


def test_a_block_released_while_a_step_still_writes_it_waits_for_that_step() -> None:
    space = new_space()
    row = allocate(space, tokens(6))
    plan = space.plan_step()
    ticket = space.hold(held(space, row))
    space.free(row)
    space.release(ticket)
    assert space.num_deferred_blocks() == 2
    acknowledge(space, plan)
    assert space.num_deferred_blocks() == 0


def test_an_aborted_step_names_the_tickets_whose_content_is_undefined() -> None:
    space = new_space()
    settled, computing = prefill(space, tokens(8)), allocate(space, tokens(8, first=100))
    plan = space.plan_step()
    certain, doubtful = space.hold(held(space, settled)), space.hold(held(space, computing))
    aborted = space.abort(plan.step_id)
    assert aborted.undefined_tickets == (doubtful,)
    assert space.ref_counts()[held(space, computing)].tolist() == [2, 2]
    space.check()
    run_step(space)  # the row computes them again, in place
    assert hit(space, tokens(9, first=100)) == 8
    for ticket in (certain, doubtful):
        space.release(ticket)
    space.check()


def test_a_held_copy_of_an_aborted_step_is_undefined() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.fork(row)
    ((_, copy),) = space.append_with_copies(row, [7])  # type: ignore[misc]
    plan = space.plan_step()
    ticket = space.hold(copy)
    assert space.abort(plan.step_id).undefined_tickets == (ticket,)
    space.check()


def test_what_a_rewound_row_was_to_compute_loses_its_name_when_the_row_leaves() -> None:
    """The block stays held, but no row will compute it."""
    space = new_space()
    row = allocate(space, tokens(8))
    plan = space.plan_step()
    ticket = space.hold(held(space, row))
    space.abort(plan.step_id)
    assert hit(space, tokens(9)) == 8  # within the open step
    space.free(row)
    assert hit(space, tokens(9)) == 0
    space.check()
    run_step(space)
    space.release(ticket)
    assert hit(space, tokens(9)) == 0
    space.check()


# What is refused


def held_space() -> BlockSpace:
    """Row 0 of 6 tokens in blocks 1 and 2, computed; row 1 of 4 in block 3, for the open step."""
    space = new_space(num_blocks=9, num_host_blocks=4)
    prefill(space, tokens(6))
    allocate(space, tokens(4, first=100))
    return space


REFUSED: dict[str, tuple[Callable[[BlockSpace], object], type[PagedKVError], str]] = {
    "null block": (lambda space: space.hold([1, 0]), BlockError, "block 0 is the null block"),
    "foreign": (lambda space: space.hold([1, 9]), BlockError, r"block 9 is not one of the blocks 1\.\.8 of pool 'dev"),
    "negative": (lambda space: space.hold(-1), BlockError, "block -1 is not one of the blocks"),
    "beyond int32": (lambda space: space.hold([2**40]), BlockError, f"block {2**40} is not one of the blocks"),
    "free": (lambda space: space.hold([1, 8]), BlockError, "block 8 of pool 'device' is free and has no content"),
    "open step": (lambda space: space.hold([1, 3]), BlockError, "block 3 .* open step: hold it once that step is pla"),
    "fractions": (lambda space: space.hold([1.0]), BlockError, r"flat array of integers, got float64 \[1\]"),
    "truth value": (lambda space: space.hold(True), BlockError, "flat array of integers, got bool"),  # noqa: FBT003
    "two dimensions": (lambda space: space.hold([[1, 2]]), BlockError, r"got int64 \[1, 2\]"),
    "ragged": (lambda space: space.hold([[1], [1, 2]]), BlockError, "block ids are no array of integers"),
    "masked": (lambda space: space.hold(np.ma.array([1])), BlockError, "plain array, got a masked one"),
    "nothing": (lambda space: space.hold(None), BlockError, "flat array of integers"),  # type: ignore[arg-type]
    "unknown pool": (lambda space: space.hold([1], "host"), ConfigurationError, "there is no pool 'host'"),
    "number": (lambda space: space.release(1), BlockError, "takes the ticket that hold returned, got 1"),  # type: ignore[arg-type]
    "made up": (lambda space: space.release(Ticket(1, "device")), BlockError, "holds no blocks of this space"),
    "another's": (lambda space: space.release(held_space().hold([1])), BlockError, "is another space.s"),
}


@pytest.mark.parametrize(("action", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_held_or_released_is_refused(
    action: Callable[[BlockSpace], object], error: type[PagedKVError], message: str
) -> None:
    space = held_space()
    ticket = space.hold([1])
    with unchanged(space), pytest.raises(error, match=message):
        action(space)
    space.release(ticket)


def test_a_ticket_released_twice_is_refused() -> None:
    space = held_space()
    ticket, other = space.hold([1, 2]), space.hold([1, 2])
    space.release(ticket)
    message = r"Ticket\(number=1, pool='device'\) holds no blocks of this space: it was released before"
    with unchanged(space), pytest.raises(BlockError, match=message):
        space.release(ticket)
    space.release(other)


def test_nothing_can_be_held() -> None:
    """As a loop over the blocks of a row may find."""
    space = new_space()
    space.release(space.hold([]))
    space.check()


@pytest.mark.parametrize("change", [1, -1])
def test_check_notices_a_reference_that_no_ticket_has(change: int) -> None:
    space = held_space()
    ticket = space.hold([1])
    state = space._state
    state.held[ticket] = np.array([1, 1][: 1 + change], np.int32)[: 1 + change]
    if change > 0:
        only_pool(space).arrays.records[1, 4] += 1
    with pytest.raises(AssertionError, match=r"block 1 has \d references, the tables hold 1, tickets \d"):
        space.check()


def test_groups_and_pools_are_held_by_name() -> None:
    space = new_space(FullAttention(4), RecurrentState(8), num_blocks={"device": 9, "state": 5})
    row = prefill(space, tokens(10))
    tickets = [space.hold(held(space, row, 0)), space.hold(held(space, row, 1), "state")]
    assert [pool.num_held for pool in space.statistics().pools] == [3, 1]
    space.free(row)
    space.check()
    for ticket in tickets:
        space.release(ticket)
    assert [pool.num_in_use for pool in space.statistics().pools] == [0, 0]
    space.check()


def test_what_the_open_plan_copies_or_swaps_into_is_not_held_before_it_is_planned() -> None:
    space = new_space(num_host_blocks=10)
    parent = prefill(space, tokens(6))
    (child,) = space.fork(parent).tolist()
    space.append(child, [6])
    copy = space.block_ids(child)[1]
    space.truncate(child, [6])
    with unchanged(space), pytest.raises(BlockError, match="by a copy or a swap of the open step"):
        space.hold([copy])
    run_step(space)
    space.release(space.hold([copy]))
    space.swap_out(parent)
    run_step(space)
    space.reset_prefix_cache()
    space.swap_in(parent)
    with unchanged(space), pytest.raises(BlockError, match="by a copy or a swap of the open step"):
        space.hold(space.block_ids(parent)[1:])
    space.check()


def test_an_absent_block_is_not_held() -> None:
    space = BlockSpace(SpaceConfig((FullAttention(4),), 8))
    absent = space.shrink(2)
    assert isinstance(absent, np.ndarray)
    for block in absent.tolist():
        with unchanged(space), pytest.raises(BlockError, match="is absent and has no content"):
            space.hold([block])
    space.check()


@pytest.mark.parametrize("tenant", [None, "b"])
def test_a_free_block_that_a_floor_keeps_is_held_for_its_own_tenant_alone(tenant: str | None) -> None:
    space = BlockSpace(SpaceConfig((FullAttention(4),), 4, watermark=0.0, tenants={"b": TenantLimits(floor=1)}))
    answer = space.allocate(tokens(4), tenant=tenant)
    assert isinstance(answer, Allocation)
    blocks = held(space, answer.row)
    run_step(space)
    space.free(answer.row)
    other = allocate(space, tokens(8, first=50))  # the other two
    assert space.num_free_blocks() == 1
    if tenant is None:
        with (
            unchanged(space),
            pytest.raises(BlockError, match=r"of the 1 free blocks .* keep 1: hold"),
        ):
            space.hold(blocks)
        space.free(other)
    ticket = space.hold(blocks)
    assert hit(space, tokens(5)) == 4
    space.check()
    space.release(ticket)
    space.check()
