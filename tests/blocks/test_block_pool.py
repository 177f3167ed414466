"""BlockPool: references, eviction order, deferral, events, and what a block costs."""

import numpy as np
import pytest

from pagedkv import BlockPool, KVCacheBlock
from pagedkv.blocks.life_cycle import drop_name, reuse_all, settle_until
from pagedkv.blocks.prefix_index import name_block
from pagedkv.blocks.record import (
    HOLD_STEP,
    LIFE,
    NULL_BLOCK,
    NUM_EVICTED,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    PoolFeatures,
)
from pagedkv.blocks.sweeps import drop_all_names, withdraw_since
from pagedkv.contract.answers import CacheEventKind
from pagedkv.errors import BlockError, ConfigurationError


def new_pool(num_blocks: int = 6, events: int = 0) -> BlockPool:
    return BlockPool("device", num_blocks, 4, features=PoolFeatures(events=events))


def take(pool: BlockPool, n: int) -> list[int]:
    taken = pool.acquire(n)
    assert taken is not None
    return taken


def name(pool: BlockPool, *blocks: int) -> None:
    """Give blocks in use names, each a first block of its own."""
    for block in blocks:
        pool.arrays.digests[block] = block
        name_block(pool.arrays, 1, block, NULL_BLOCK, 0)


def queue_of(pool: BlockPool) -> list[int]:
    return pool.free_queue.get_all_free_blocks()


@pytest.mark.interpreted
def test_acquire_takes_all_or_none() -> None:
    pool = new_pool(4)
    assert pool.acquire(4) is None
    assert queue_of(pool) == [1, 2, 3]
    assert pool.acquire(3) == [1, 2, 3]
    assert pool.acquire(1) is None
    assert pool.acquire(0) == []


def test_acquiring_a_negative_number_is_an_error() -> None:
    with pytest.raises(BlockError, match="-1"):
        new_pool().acquire(-1)


@pytest.mark.interpreted
def test_blocks_without_content_go_first_the_newest_freed_first_of_all() -> None:
    """Promise 4: and cached blocks last, in the order in which they were released."""
    pool = new_pool(7)
    blocks = take(pool, 6)
    name(pool, 2, 4, 6)
    for block in blocks:
        pool.release([block])
    assert queue_of(pool) == [5, 3, 1, 2, 4, 6]


@pytest.mark.interpreted
def test_acquiring_a_cached_block_evicts_it() -> None:
    pool = new_pool(3)
    take(pool, 2)
    name(pool, 1)
    pool.release([1, 2])
    life = int(pool.arrays.records[1, LIFE])
    assert take(pool, 2) == [2, 1]
    assert pool.arrays.counts[NUM_EVICTED] == 1
    assert pool.prefix_index.named_blocks().tolist() == []
    assert pool.arrays.records[1, LIFE] > life


def test_a_block_stays_until_its_last_reference_goes() -> None:
    pool = new_pool()
    take(pool, 1)
    reuse_all(pool.arrays, np.array([1, NULL_BLOCK, 1], np.int32))
    pool.release([1, 1])
    assert pool.block(1).place == "in use"
    pool.release([1])
    assert pool.block(1).place == "free"


def test_a_hit_takes_a_cached_block_out_of_the_middle_of_the_queue() -> None:
    pool = new_pool()
    take(pool, 3)
    name(pool, 1, 2, 3)
    pool.release([1, 2, 3])
    reuse_all(pool.arrays, np.array([2], np.int32))
    assert queue_of(pool) == [4, 5, 1, 3]
    assert pool.block(2).ref_count == 1


@pytest.mark.parametrize(
    ("released", "message"),
    [
        ([1, 3], "block 3 of pool 'device' has 0 references, 1 were released"),
        ([1, 2, 1], "block 1 of pool 'device' has 1 references, 2 were released"),
        ([1, 0], "block 0 is not one of the blocks 1..5 of pool 'device'"),
        ([1, 6], "block 6 is not one of the blocks 1..5"),
        ([1, -1], "block -1 is not one of the blocks 1..5"),
    ],
    ids=["never acquired", "twice at once", "null block", "beyond the pool", "negative"],
)
def test_releasing_what_is_not_held_is_an_error_that_changes_nothing(released: list[int], message: str) -> None:
    """Promise 5: the error names the block and its owner."""
    pool = new_pool()
    take(pool, 2)
    before = pool.arrays.records.copy()
    with pytest.raises(BlockError, match=message):
        pool.release(released)
    np.testing.assert_array_equal(pool.arrays.records, before)


def test_a_second_release_is_an_error() -> None:
    pool = new_pool()
    take(pool, 1)
    pool.release([1])
    with pytest.raises(BlockError, match="block 1 of pool 'device' has 0 references"):
        pool.release([1])


@pytest.mark.interpreted
def test_a_block_that_a_step_may_still_use_waits_for_it_in_order() -> None:
    pool = new_pool()
    take(pool, 3)
    pool.arrays.records[1, HOLD_STEP] = 1
    pool.arrays.records[2, HOLD_STEP] = 2
    pool.release([1, 2, 3])
    assert [pool.block(block).place for block in (1, 2, 3)] == ["deferred", "deferred", "free"]
    settle_until(pool.arrays, 1)
    assert [pool.block(block).place for block in (1, 2, 3)] == ["free", "deferred", "free"]
    settle_until(pool.arrays, 2)
    assert queue_of(pool) == [2, 1, 3, 4, 5]


def test_where_nobody_says_which_step_may_use_a_block_it_waits_for_all_that_are_planned() -> None:
    pool = new_pool()
    take(pool, 1)
    pool.arrays.counts[OPEN_STEP] = 3
    pool.release([1])
    settle_until(pool.arrays, 1)
    assert pool.block(1).place == "deferred"
    settle_until(pool.arrays, 2)
    assert pool.block(1).place == "free"


def test_a_hit_on_a_deferred_block_takes_it_back_into_use() -> None:
    pool = new_pool()
    take(pool, 1)
    name(pool, 1)
    pool.arrays.records[1, HOLD_STEP] = 1
    pool.release([1])
    reuse_all(pool.arrays, np.array([1], np.int32))
    settle_until(pool.arrays, 1)
    assert pool.block(1).place == "in use"
    assert queue_of(pool) == [2, 3, 4, 5]


def test_dropping_the_name_of_a_free_block_makes_it_the_next_to_go() -> None:
    pool = new_pool()
    take(pool, 2)
    name(pool, 1, 2)
    pool.release([1, 2])
    drop_name(pool.arrays, 2)
    assert queue_of(pool) == [2, 3, 4, 5, 1]


def test_dropping_all_names_leaves_blocks_in_use_where_they_are() -> None:
    pool = new_pool()
    take(pool, 3)
    name(pool, 1, 2)
    pool.release([2])
    assert drop_all_names(pool.arrays) == 2
    assert pool.prefix_index.named_blocks().tolist() == []
    assert [pool.block(block).place for block in (1, 2, 3)] == ["in use", "free", "in use"]


def test_withdrawing_drops_only_what_the_steps_were_to_compute() -> None:
    pool = new_pool()
    take(pool, 3)
    name(pool, 1, 2, 3)
    pool.arrays.records[[1, 2, 3], PENDING_STEP] = [1, 2, 3]
    assert withdraw_since(pool.arrays, 2) == 2
    assert pool.prefix_index.named_blocks().tolist() == [1]


def test_a_view_shows_one_block_as_it_was() -> None:
    pool = new_pool()
    take(pool, 2)
    name(pool, 2)
    pool.arrays.records[2, PENDING_STEP] = pool.arrays.counts[OPEN_STEP]
    view = pool.block(2)
    expected = KVCacheBlock(
        block_id=2, ref_count=1, group=0, digest=bytes([0, 0, 0, 2] * 8), is_computed=False, place="in use"
    )
    assert view == expected
    pool.release([2])
    assert view == expected
    assert pool.block(1) == KVCacheBlock(1, ref_count=1, group=None, digest=None, is_computed=True, place="in use")
    with pytest.raises(AttributeError):
        view.ref_count = 2  # type: ignore[misc]


@pytest.mark.parametrize("block", [0, 6, -1])
def test_a_foreign_block_has_no_view(block: int) -> None:
    with pytest.raises(BlockError, match=f"block {block} is not one of the blocks 1..5 of pool 'device'"):
        new_pool().block(block)


@pytest.mark.plain_only  # compiled, its loops take half a minute to build
def test_the_event_log_keeps_the_latest_and_tells_what_it_lost() -> None:
    pool = new_pool(3000, events=100)
    take(pool, 2999)
    name(pool, *range(1, 101))
    assert pool.drain_events().block_ids.tolist() == list(range(1, 101))
    name(pool, *range(101, 262))
    events = pool.drain_events()
    assert events.kinds.tolist() == [CacheEventKind.GAP] + [CacheEventKind.STORED] * 100
    assert events.block_ids.tolist() == [61, *range(162, 262)]
    assert events.groups[0] == -1
    assert not events.digests[0].any()
    assert len(pool.drain_events()) == 0


@pytest.mark.interpreted
def test_dropping_every_name_is_one_event() -> None:
    pool = new_pool(300, events=10)
    take(pool, 299)
    name(pool, *range(1, 4))
    pool.clear_names()
    assert pool.drain_events().kinds.tolist() == [CacheEventKind.STORED] * 3 + [CacheEventKind.CLEARED]
    assert len(pool.prefix_index) == 0


def test_without_events_nothing_is_logged() -> None:
    pool = new_pool()
    take(pool, 1)
    name(pool, 1)
    pool.clear_names()
    assert len(pool.drain_events()) == 0
    assert pool.arrays.event_log.nbytes == 0


@pytest.mark.parametrize("num_blocks", [1_000_000, 2**19 + 1])
def test_a_block_takes_at_most_160_bytes(num_blocks: int) -> None:
    """Promise 19, at blocks of 16 tokens; just above a power of two the index has the most buckets a block."""
    assert BlockPool("device", num_blocks, 16).nbytes / num_blocks <= 160


def test_without_caching_a_block_takes_its_record_alone() -> None:
    pool = BlockPool("device", 100_000, 16, caching=False)
    assert pool.nbytes / pool.num_blocks < 64


@pytest.mark.parametrize("num_blocks", [0, -3])
def test_a_pool_without_blocks_cannot_be(num_blocks: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{num_blocks}"):
        BlockPool("device", num_blocks)


@pytest.mark.interpreted
def test_a_new_pool_has_every_block_but_the_null_block_free() -> None:
    pool = new_pool()
    assert queue_of(pool) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_usable) == (5, 5)
    assert pool.arrays.records[NULL_BLOCK, QUEUE] == 0
