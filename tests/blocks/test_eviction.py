"""Eviction policies, with the numbers written out."""

import pytest

from pagedkv import BlockPool
from pagedkv.blocks.eviction.adaptive import ADAPTIVE, PROTECTED, REUSED
from pagedkv.blocks.eviction.policy import LRU
from pagedkv.blocks.eviction.registry import DEFAULT
from tests.blocks.eviction_model import Flows, NamedPool, digest_words

pytestmark = pytest.mark.plain_only

NUM_BLOCKS = 16  # of the pools below: the target begins at 2 blocks, 32 sixteenths
FIRST = 2  # the first content
FILLING = range(FIRST, FIRST + NUM_BLOCKS)


def full_pool() -> NamedPool:
    """Make a pool that just released contents 2 to 17, each a first block of its own; 2 is evicted next."""
    pool = NamedPool(NUM_BLOCKS)
    assert pool.compute_and_release(FILLING) == list(range(1, NUM_BLOCKS + 1))
    return pool


def hit(pool: NamedPool, *blocks: int) -> None:
    """Hit blocks, one after the other."""
    for block in blocks:
        pool.reuse(block)
        pool.release(block)


def evict_content_2(pool: NamedPool) -> None:
    """Fill a pool and evict its first block, never hit, with the clock at 16; two acquisitions have been since."""
    pool.compute_and_release([*FILLING, 100])
    assert pool.pool.prefix_index.named_blocks().tolist() == list(range(1, NUM_BLOCKS + 1))
    assert pool.flows == Flows(cold=2, reused=1, countdown=15)


def test_a_pool_begins_with_a_target_of_an_eighth_and_even_flows() -> None:
    pool = NamedPool(NUM_BLOCKS)
    assert (pool.target, pool.num_protected) == (32, 0)
    assert pool.flows == Flows(cold=1, reused=1, countdown=NUM_BLOCKS)


def test_what_comes_back_soon_without_a_hit_ever_lowers_the_target() -> None:
    pool = NamedPool(NUM_BLOCKS)
    evict_content_2(pool)
    block = pool.compute(FIRST)
    assert pool.flows == Flows(cold=3, reused=1, countdown=14)
    assert pool.target == 32 - 8 * (3 + 1) // 3 == 22
    assert pool.rank(block) == PROTECTED | REUSED
    assert pool.num_protected == 1


def test_what_comes_back_soon_and_was_hit_raises_the_target() -> None:
    """Three hits, of which the target lets two be protected: the first is demoted, behind 13 that were never hit."""
    pool = full_pool()
    hit(pool, 1, 2, 3)
    pool.compute_and_release(range(100, 114))
    assert pool.flows == Flows(cold=14, reused=2, countdown=2)
    block = pool.compute(FIRST)
    assert pool.flows == Flows(cold=15, reused=2, countdown=1)
    assert pool.target == 32 + 8 * (15 + 2) // 2 == 100
    assert pool.rank(block) == PROTECTED | REUSED


@pytest.mark.parametrize(("target", "expected"), [(3, 0), (10, 0), (11, 1)])
def test_the_target_never_falls_below_nothing(target: int, expected: int) -> None:
    pool = NamedPool(NUM_BLOCKS)
    evict_content_2(pool)
    pool.target = target
    pool.compute(FIRST)
    assert pool.target == expected


@pytest.mark.parametrize(("target", "expected"), [(171, 239), (172, 240), (240, 240)])
def test_the_target_never_rises_above_fifteen_sixteenths_of_the_blocks(target: int, expected: int) -> None:
    pool = full_pool()
    hit(pool, 1, 2, 3)
    pool.compute_and_release(range(100, 114))
    pool.target = target
    pool.compute(FIRST)
    assert pool.target == expected


def test_flows_are_halved_after_as_many_evictions_as_blocks() -> None:
    pool = full_pool()
    pool.compute_and_release(range(100, 115))
    assert pool.flows == Flows(cold=16, reused=1, countdown=1)
    pool.compute_and_release([115])
    assert pool.flows == Flows(cold=17 // 2 + 1, reused=1 // 2 + 1, countdown=NUM_BLOCKS)


def test_the_protected_beyond_the_target_go_to_the_back_of_the_cold_list() -> None:
    pool = full_pool()
    hit(pool, 1, 2)
    assert (pool.free[-2:], pool.protected, pool.num_protected) == ([1, 2], [1, 2], 2)
    hit(pool, 3)
    assert (pool.protected, pool.num_protected) == ([2, 3], 2)
    assert pool.free == [*range(4, NUM_BLOCKS + 1), 1, 2, 3]
    assert pool.rank(1) == REUSED


def test_protected_blocks_in_use_count_but_only_free_ones_are_demoted() -> None:
    pool = full_pool()
    hit(pool, 1, 2)
    for block in (3, 4, 5):
        pool.reuse(block)
    assert (pool.protected, pool.num_protected) == ([1, 2], 5)
    pool.release(5)
    assert (pool.protected, pool.num_protected) == ([], 2)
    assert pool.free[-3:] == [1, 2, 5]
    pool.release(4)
    assert (pool.protected, pool.num_protected) == ([4], 2)


def test_a_hit_on_a_demoted_block_protects_it_again() -> None:
    pool = full_pool()
    hit(pool, 1, 2, 3, 1)
    assert (pool.protected, pool.num_protected) == ([3, 1], 2)


@pytest.mark.parametrize("parent_is", ["protected", "not protected", "free", "deferred", "in another life"])
def test_content_is_protected_at_birth_only_under_a_protected_parent_in_use(parent_is: str) -> None:
    pool = NamedPool(NUM_BLOCKS)
    parent = pool.compute(50)
    if parent_is != "not protected":
        pool.reuse(parent)
        pool.release(parent)
    pool.compute_and_release(FILLING)
    target = pool.target
    if parent_is == "deferred":
        pool.plan_step()
    if parent_is in {"free", "deferred"}:
        pool.release(parent)
        assert pool.pool.block(parent).place == parent_is
    block = pool.acquire()
    pool.name(block, FIRST, parent, num_lives_ago=parent_is == "in another life")
    assert bool(pool.rank(block) & PROTECTED) == (parent_is == "protected")
    assert (pool.target < target) == (parent_is == "protected")


@pytest.mark.parametrize(
    ("away", "is_protected", "votes"), [(4, True, True), (5, True, False), (16, True, False), (17, False, False)]
)
def test_only_what_comes_back_soon_votes_and_after_as_many_acquisitions_as_blocks_all_is_forgotten(
    away: int, *, is_protected: bool, votes: bool
) -> None:
    pool = NamedPool(NUM_BLOCKS)
    evict_content_2(pool)
    pool.clock = NUM_BLOCKS + away - 1  # one more when it is acquired
    block = pool.compute(FIRST)
    assert bool(pool.rank(block)) == is_protected
    assert (pool.target != 32) == votes


@pytest.mark.parametrize("before_the_wrap", [1, 15, 17, 18])
def test_the_clock_of_ghosts_wraps(before_the_wrap: int) -> None:
    """Content 2 is evicted 16 acquisitions after the start, and named again with the 18th."""
    pool = NamedPool(NUM_BLOCKS)
    pool.clock = 2**32 - before_the_wrap
    evict_content_2(pool)
    block = pool.compute(FIRST)
    assert (pool.rank(block), pool.target) == (PROTECTED | REUSED, 22)


def test_one_ghost_is_lost_when_the_clock_wraps() -> None:
    pool = NamedPool(NUM_BLOCKS)
    pool.clock = 2**32 - NUM_BLOCKS
    evict_content_2(pool)
    assert pool.rank(pool.compute(FIRST)) == 0


def test_away_for_longer_than_the_clock_can_tell_is_a_wrong_guess_and_no_more() -> None:
    pool = NamedPool(NUM_BLOCKS)
    evict_content_2(pool)
    pool.clock = 2**32 + NUM_BLOCKS
    assert pool.rank(pool.compute(FIRST)) == PROTECTED | REUSED


def test_a_ghost_is_heeded_once() -> None:
    pool = NamedPool(NUM_BLOCKS)
    evict_content_2(pool)
    pool.drop_name(pool.compute(FIRST))
    assert pool.rank(pool.compute(FIRST)) == 0
    assert pool.target == 22


def test_a_later_ghost_takes_the_slot_of_an_earlier_one() -> None:
    pool = NamedPool(2, num_slots=1)
    pool.compute_and_release([10, 20, 30, 40])  # evicted: 10, then 20
    assert pool.arrays.eviction_table.tolist() == [[20, 3]]
    assert pool.rank(pool.compute(10)) == 0
    assert pool.arrays.eviction_table.tolist() == [[30, 4]]


def test_ghosts_that_look_alike_are_one() -> None:
    """Digests of 256 bits, of which 31 and the slot are kept: a wrong guess protects a block for nothing."""
    assert digest_words(10)[1] // 2 == digest_words(11)[1] // 2
    pool = NamedPool(4, num_slots=1)
    pool.compute_and_release([10, 20, 30, 40])
    spare = pool.free[-1]
    pool.compute_and_release([50])
    pool.drop_name(spare)
    assert pool.arrays.eviction_table.tolist() == [[10, 4]]
    assert pool.rank(pool.compute(11)) == PROTECTED | REUSED


@pytest.mark.parametrize("content", [0, 1])
def test_an_empty_slot_is_no_ghost(content: int) -> None:
    pool = NamedPool(NUM_BLOCKS)
    block = pool.compute(content)
    assert (pool.rank(block), pool.target) == (0, 32)


def test_dropping_the_name_of_a_protected_block_takes_it_off_the_count() -> None:
    pool = full_pool()
    hit(pool, 1, 2)
    pool.reuse(3)
    pool.drop_name(1)
    assert (pool.num_protected, pool.rank(1), pool.protected) == (2, 0, [2])
    assert pool.free[0] == 1
    pool.drop_name(3)
    assert (pool.num_protected, pool.rank(3)) == (1, 0)
    pool.release(3)
    assert pool.free[:2] == [3, 1]
    pool.drop_all_names()
    assert (pool.num_protected, pool.protected) == (0, [])
    assert sorted(pool.free) == list(range(1, NUM_BLOCKS + 1))


def test_blocks_without_content_go_first_and_protected_ones_last() -> None:
    pool = NamedPool(5)
    blocks = [pool.acquire() for _ in range(5)]
    for block in (1, 2, 3):
        pool.name(block, 10 + block)
    pool.target = 5 * 16
    hit(pool, 2)
    for block in blocks:
        pool.release(block)
    assert (pool.free, pool.protected) == ([5, 4, 1, 3, 2], [2])
    assert [pool.acquire() for _ in range(5)] == [5, 4, 1, 3, 2]


def test_the_protected_list_is_used_when_the_cold_one_is_empty() -> None:
    pool = NamedPool(3)
    pool.compute_and_release([10, 20, 30])
    pool.target = 3 * 15
    for block in (3, 1):
        pool.reuse(block)
    assert pool.acquire() == 2
    for block in (3, 1):
        pool.release(block)
    assert (pool.free, pool.protected, pool.num_protected) == ([3, 1], [3, 1], 2)
    assert pool.acquire() == 3
    assert (pool.num_protected, pool.flows) == (1, Flows(cold=2, reused=2, countdown=1))


def test_lru_neither_remembers_nor_protects() -> None:
    pool = NamedPool(4, LRU)
    pool.compute_and_release([10, 20, 30, 40, 50])
    hit(pool, 2)
    assert (pool.rank(2), pool.num_protected, pool.target) == (0, 0, 0)
    assert (pool.free, pool.protected) == ([3, 4, 1, 2], [])
    assert pool.arrays.eviction_table.nbytes == 0
    assert pool.rank(pool.compute(10)) == 0


def test_lru_is_the_default() -> None:
    assert DEFAULT is LRU is BlockPool("device", 9).policy
    assert len(BlockPool("device", 9).arrays.eviction_table) == 0


def test_without_caching_there_is_nothing_to_remember() -> None:
    assert len(BlockPool("device", 9, caching=False, policy=ADAPTIVE).arrays.eviction_table) == 0


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(1, 16), (4, 16), (5, 32), (1024, 4096), (1025, 8192)])
def test_the_ghost_table_has_four_to_eight_slots_of_8_bytes_a_block(num_blocks: int, num_slots: int) -> None:
    ghosts = NamedPool(num_blocks).arrays.eviction_table
    assert ghosts.nbytes == 8 * len(ghosts) == 8 * num_slots
