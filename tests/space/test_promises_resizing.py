"""Promise 30: a pool gives blocks back and takes them again, and no block in use is moved or lost."""

import tracemalloc
from typing import cast

import numpy as np
import pytest

from pagedkv import AllocStatus, BlockHolders, BlockSpace, FullAttention, Shortage, SlidingWindow, TenantLimits
from pagedkv.blocks.record import ABSENT, NAME, NUM_ABSENT, QUEUE, REF_COUNT
from pagedkv.contract.answers import MissCause
from pagedkv.errors import ConfigurationError
from tests.space.spaces import allocate, cache, hit, new_space, only_pool, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted


def shrunk(space: BlockSpace, num_blocks: int, run: int = 1, pool: str | None = None) -> list[int]:
    """Give blocks back that can be given back."""
    answer = space.shrink(num_blocks, run=run, pool=pool)
    assert not isinstance(answer, BlockHolders), answer
    space.check()
    return cast("list[int]", answer.tolist())


def test_promise_30_what_would_be_allocated_next_is_given_back_first() -> None:
    space = new_space(num_blocks=10)
    cache(space, tokens(8))
    cache(space, tokens(8, first=100))
    order = only_pool(space).free_queue.get_all_free_blocks()
    assert shrunk(space, 7) == order[:7]
    assert hit(space, tokens(9)) == 0
    assert hit(space, tokens(9, first=100)) == 8
    assert shrunk(space, 1) == order[7:8]
    assert hit(space, tokens(9, first=100)) == 4


def test_promise_30_absent_blocks_are_never_allocated() -> None:
    space = new_space(num_blocks=10)
    gone = shrunk(space, 5)
    assert space.num_absent_blocks() == 5
    assert space.num_live_blocks() == 0
    assert space.allocate(tokens(17)) == Shortage("device", num_needed=5, num_free=4)
    row = allocate(space, tokens(16))
    assert set(gone).isdisjoint(space.block_ids(row))


def test_promise_30_never_is_judged_by_all_blocks_and_later_by_those_that_are_there() -> None:
    space = new_space(num_blocks=10)
    shrunk(space, 5)
    assert space.can_allocate(tokens(16)) is AllocStatus.OK
    assert space.can_allocate(tokens(17)) is AllocStatus.LATER
    assert space.can_allocate(tokens(36)) is AllocStatus.LATER
    assert space.can_allocate(tokens(37)) is AllocStatus.NEVER


def test_promise_30_the_watermark_is_a_part_of_what_is_there() -> None:
    space = new_space(num_blocks=101, watermark=0.1)
    shrunk(space, 50)
    allocate(space, tokens(4))
    assert space.can_allocate(tokens(4 * 44, first=9)) is AllocStatus.OK
    assert space.can_allocate(tokens(4 * 45, first=9)) is AllocStatus.LATER


def test_promise_30_a_block_in_use_stays_and_its_rows_are_told() -> None:
    space = new_space(num_blocks=10)
    small, large = prefill(space, tokens(4)), prefill(space, tokens(12, first=100))
    with unchanged(space):
        answer = space.shrink(6)
    assert isinstance(answer, BlockHolders)
    assert (answer.num_wanted, answer.num_available) == (6, 5)
    assert answer.rows.tolist() == [large, small]
    assert answer.num_blocks.tolist() == [3, 1]
    assert f"can give back 5 of 6 blocks: row {large} holds 3, row {small} holds 1" in str(answer)
    tables = [space.block_ids(row) for row in (small, large)]
    assert len(shrunk(space, 5)) == 5
    assert [space.block_ids(row) for row in (small, large)] == tables
    space.free([large])
    assert len(shrunk(space, 3)) == 3


def test_promise_30_blocks_that_wait_for_a_step_stay_until_it_is_over() -> None:
    space = new_space(num_blocks=5)
    row = allocate(space, tokens(16))
    plan = space.plan_step()
    space.free([row])
    answer = space.shrink(1)
    assert isinstance(answer, BlockHolders)
    assert (answer.num_available, answer.num_deferred) == (0, 4)
    space.acknowledge(plan.step_id)
    shrunk(space, 4)


def test_promise_30_blocks_that_a_ticket_holds_are_told() -> None:
    space = new_space(num_blocks=5)
    row = prefill(space, tokens(16))
    space.hold(space.block_ids(row)[:2])
    space.free([row])
    answer = space.shrink(3)
    assert isinstance(answer, BlockHolders)
    assert (answer.num_available, answer.num_ticketed, len(answer.rows)) == (2, 2, 0)


def test_promise_30_a_run_goes_whole_and_the_null_blocks_run_never() -> None:
    space = new_space(num_blocks=18)
    row = allocate(space, tokens(4 * 5))  # blocks 1 to 5
    run_step(space)
    assert isinstance(space.shrink(12, run=4), BlockHolders)
    assert shrunk(space, 8, run=4) == [8, 9, 10, 11, 12, 13, 14, 15]
    space.free([row])
    answer = space.shrink(8, run=4)
    assert isinstance(answer, BlockHolders)
    assert answer.num_available == 4
    assert shrunk(space, 4, run=4) == [4, 5, 6, 7]
    with pytest.raises(ConfigurationError, match="7 blocks of pool 'device' are no whole runs of 4"):
        space.shrink(7, run=4)


def test_promise_30_the_run_that_is_used_last_goes_first() -> None:
    """Not the one with the fewest cached blocks: one recent block keeps its run."""
    space = new_space(num_blocks=9, prefix_caching=True)
    cache(space, tokens(4 * 6))  # blocks 1 to 6
    cache(space, tokens(5))  # block 1 is used again
    last = space.next_victims(9).block_ids.tolist()
    assert shrunk(space, 2, run=2) == [2, 3] if last.index(3) < last.index(5) else [4, 5]


def test_promise_30_what_was_given_back_counts_as_evicted() -> None:
    space = new_space(num_blocks=6, explain=True)
    cache(space, tokens(17))
    shrunk(space, 5)
    assert space.statistics().pools[0].num_evictions == 4
    assert space.explain(tokens(17)).misses[0].cause is MissCause.EVICTED


def test_promise_30_grown_blocks_are_allocated_first_and_a_shrink_takes_them_again() -> None:
    space = new_space(num_blocks=20)
    cache(space, tokens(20))
    shrunk(space, 8, run=2)
    grown = space.grow(4, run=2)
    space.check()
    assert shrunk(space, 4, run=2) == grown.tolist()
    assert (space.grow(4, run=2) == grown).all()
    row = allocate(space, tokens(16, first=100))
    assert space.block_ids(row) == grown.tolist()


def test_promise_30_no_more_comes_back_than_was_given() -> None:
    space = new_space(num_blocks=20)
    shrunk(space, 3)
    with unchanged(space), pytest.raises(ConfigurationError, match="3 are absent, 0 of them in whole runs of 4"):
        space.grow(4, run=4)
    assert space.grow(3).tolist() == [1, 2, 3]
    assert space.num_free_blocks() == 19


def test_promise_30_each_pool_has_its_own_size() -> None:
    space = new_space(FullAttention(4, pool="a"), SlidingWindow(8, 4, pool="b"), num_blocks={"a": 9, "b": 9})
    shrunk(space, 5, pool="b")
    assert (space.num_free_blocks("a"), space.num_free_blocks("b")) == (8, 3)
    assert space.allocate(tokens(16)) == Shortage("b", num_needed=4, num_free=3)


def test_promise_30_what_the_floor_of_a_tenant_keeps_is_not_given_back() -> None:
    space = new_space(num_blocks=11, tenants={"a": TenantLimits(floor=4)})
    answer = space.shrink(7)
    assert isinstance(answer, BlockHolders)
    assert answer.num_available == 6
    row = space.allocate(tokens(12), tenant="a").row
    run_step(space)
    space.free([row])  # three of its blocks are cached, and one more is its own
    shrunk(space, 6)
    assert hit(space, tokens(13)) == 12
    assert space.allocate(tokens(16, first=100), tenant="a").row >= 0


def test_promise_30_content_that_is_kept_goes_last() -> None:
    space = new_space(num_blocks=10, leases=True)
    cache(space, tokens(8))
    space.lease(tokens(9), 10.0)
    cache(space, tokens(8, first=100))
    shrunk(space, 7)
    assert (hit(space, tokens(9)), hit(space, tokens(9, first=100))) == (8, 0)


def test_promise_30_swapped_rows_hold_nothing_of_the_device() -> None:
    space = new_space(num_blocks=6, num_host_blocks=6)
    row = prefill(space, tokens(16))
    space.swap_out([row])
    run_step(space)
    shrunk(space, 5)
    assert space.can_swap_in([row]) is AllocStatus.LATER
    space.grow(5)
    assert space.can_swap_in([row]) is AllocStatus.OK


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (NAME, 1, "index and named blocks differ"),
        (REF_COUNT, 1, "referenced and queued"),
        (QUEUE, 0, "referenced and queued"),
    ],
)
def test_promise_17_the_audit_sees_an_absent_block_that_is_used(column: int, value: int, message: str) -> None:
    space = new_space(num_blocks=10)
    (block, *_) = shrunk(space, 3)
    only_pool(space).arrays.records[block, column] = value
    with pytest.raises(AssertionError, match=message):
        space.check()


def test_promise_17_the_audit_counts_absent_blocks() -> None:
    space = new_space(num_blocks=10)
    shrunk(space, 3)
    only_pool(space).arrays.counts[NUM_ABSENT] = 2
    with pytest.raises(AssertionError, match="absent blocks miscounted"):
        space.check()


def test_an_absent_block_shows_as_one() -> None:
    space = new_space(num_blocks=10)
    (block, *_) = shrunk(space, 3)
    assert only_pool(space).arrays.records[block, QUEUE] == ABSENT
    assert only_pool(space).block(block).place == "absent"
    assert space.statistics().pools[0].num_absent == 3
    assert np.count_nonzero(only_pool(space).arrays.records[:, QUEUE] == ABSENT) == 3


def test_promise_30_runs_longer_than_the_pool_take_no_memory() -> None:
    space = new_space()
    tracemalloc.start()
    try:
        assert shrunk(space, 0, run=2**22) == []
        assert space.grow(0, run=2**22).tolist() == []
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
