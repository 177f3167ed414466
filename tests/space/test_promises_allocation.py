"""The manager's promises about allocation (docs/design.md, Promises: 1 to 5), each by direct examples."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import Allocation, AllocStatus, BlockSpace, FullAttention, RecurrentState, Shortage, SlidingWindow
from pagedkv.errors import FreedSequenceError, OutOfBlocksError, PagedKVError, UnknownSequenceError
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

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


# 1. can_allocate: OK, LATER or NEVER


@pytest.mark.interpreted
def test_promise_01_can_allocate_goes_by_the_free_blocks() -> None:
    """8 blocks of 4 tokens, of which a running sequence takes 5."""
    space = new_space(num_blocks=9)
    assert [space.can_allocate(tokens(length)) for length in (32, 33)] == [OK, NEVER]
    row = allocate(space, tokens(20, first=100))
    assert [space.can_allocate(tokens(length)) for length in (12, 13, 32, 33)] == [OK, LATER, LATER, NEVER]
    space.free(row)
    assert space.can_allocate(tokens(32)) is OK


def test_promise_01_lookahead_counts() -> None:
    space = new_space(num_blocks=9)
    assert [space.can_allocate(tokens(30), num_lookahead=ahead) for ahead in (2, 3)] == [OK, NEVER]


def test_promise_01_hits_on_blocks_in_use_save_blocks() -> None:
    space = new_space(num_blocks=9)
    prefill(space, tokens(20))
    assert space.can_allocate(tokens(32)) is OK  # 5 of its 8 blocks are shared, 3 are free
    assert space.can_allocate(tokens(32, first=100)) is LATER


def test_promise_01_hits_on_free_blocks_save_none() -> None:
    """A cached block is one of the free ones: it can be hit or evicted, not both."""
    space = new_space(num_blocks=9)
    cache(space, tokens(16))
    allocate(space, tokens(8, first=100))
    assert space.can_allocate(tokens(24)) is OK  # 4 cached and 2 empty blocks
    assert space.can_allocate(tokens(25)) is LATER


def test_promise_01_the_watermark_holds_admissions_back() -> None:
    """100 blocks, of which 10 stay free for running sequences: the boundary, exactly."""
    space = new_space(watermark=0.1)
    allocate(space, tokens(4, first=900))
    assert space.can_allocate(tokens(89 * 4)) is OK
    assert space.can_allocate(tokens(90 * 4)) is LATER


def test_promise_01_the_watermark_does_not_hold_running_sequences_back() -> None:
    space = new_space(num_blocks=11, watermark=0.5)
    row = allocate(space, tokens(4))
    assert space.append([row], tokens(36, first=4), [36]) is None
    assert space.num_free_blocks() == 0


def test_promise_01_the_watermark_is_waived_while_a_pool_serves_nobody() -> None:
    """Or a sequence that needs nearly all of it would wait for ever."""
    space = new_space(watermark=0.1)
    assert space.can_allocate(tokens(400)) is OK
    cache(space, tokens(200, first=500))  # cached blocks are not in use
    assert space.can_allocate(tokens(400)) is OK


def test_promise_01_never_means_not_even_an_empty_pool() -> None:
    """Nor a pool that is full, nor one whose watermark forbids it, makes it NEVER."""
    space = new_space(num_blocks=9, watermark=0.9)
    allocate(space, tokens(32, first=100))
    assert [space.can_allocate(tokens(length)) for length in (1, 32, 33)] == [LATER, LATER, NEVER]


def test_promise_01_every_pool_is_asked() -> None:
    space = new_space(FullAttention(4), RecurrentState(4), num_blocks={"device": 101, "state": 4})
    assert [space.can_allocate(tokens(length)) for length in (12, 13)] == [OK, NEVER]
    prefill(space, tokens(5, first=100))
    assert space.can_allocate(tokens(12)) is LATER


def test_promise_01_without_a_vacant_row_it_is_later() -> None:
    space = new_space(max_sequences=1)
    row = allocate(space, tokens(4))
    assert space.can_allocate(tokens(4)) is LATER
    space.free(row)
    assert space.can_allocate(tokens(4)) is OK


# 2. A question changes nothing; an action happens whole, or not at all


def running_and_swapped() -> BlockSpace:
    """Row 0 is running, row 1 swapped out, something is cached, and there is an open step."""
    space = new_space(num_blocks=21, num_host_blocks=11, watermark=0.1)
    rows = [prefill(space, tokens(10)), prefill(space, tokens(6, first=100))]
    cache(space, tokens(9, first=200))
    space.swap_out(rows[1:])
    run_step(space)
    space.append(rows[:1], [7])
    return space


QUESTIONS: dict[str, Callable[[BlockSpace], object]] = {
    "match": lambda space: space.match(tokens(11)),
    "match_each": lambda space: space.match_each(tokens(11)),
    "can_allocate": lambda space: space.can_allocate(tokens(30)),
    "num_allocatable": lambda space: space.num_allocatable([space.match(tokens(11)), space.match(tokens(30))]),
    "can_append": lambda space: space.can_append([0], [50]),
    "can_swap_out": lambda space: space.can_swap_out([0]),
    "can_swap_in": lambda space: space.can_swap_in([1]),
    "num_tokens": lambda space: space.num_tokens(1),
    "block_ids": lambda space: space.block_ids(1),
    "computed_block_ids": lambda space: space.computed_block_ids(0),
    "num_free_blocks": lambda space: space.num_free_blocks(),
    "statistics": lambda space: space.statistics(),
    "check": lambda space: space.check(),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_promise_02_a_question_changes_nothing(question: Callable[[BlockSpace], object]) -> None:
    space = running_and_swapped()
    with unchanged(space):
        question(space)


@pytest.mark.interpreted
def test_promise_02_a_prompt_that_does_not_fit_takes_nothing() -> None:
    """Though two of its blocks hit, and others are free or could be evicted."""
    space = new_space(num_blocks=9)
    cache(space, tokens(8))
    allocate(space, tokens(16, first=100))
    with unchanged(space):
        assert space.allocate(tokens(20)) == Shortage("device", num_needed=5, num_free=4)


@pytest.mark.parametrize("short", ["first", "second"])
def test_promise_02_whichever_pool_is_short_no_other_is_touched(short: str) -> None:
    groups = FullAttention(4, pool="first"), FullAttention(4, pool="second")
    space = new_space(*groups, num_blocks={"first": 101, "second": 101, short: 5})
    row = prefill(space, tokens(8, first=100))
    with unchanged(space):
        assert space.allocate(tokens(12)) == Shortage(short, num_needed=3, num_free=2)
    with unchanged(space):
        assert space.append([row], tokens(12), [12]) == Shortage(short, num_needed=3, num_free=2)


def test_promise_02_a_batch_that_does_not_fit_grows_no_row() -> None:
    """The first rows would fit; a fork among them would copy on write."""
    space = new_space(num_blocks=8)
    row = prefill(space, tokens(6))
    rows = [row, *space.fork(row).tolist(), prefill(space, tokens(8, first=100))]
    with unchanged(space):
        assert space.append(rows, tokens(12), [1, 1, 10]) == Shortage("device", num_needed=4, num_free=3)


def test_promise_2_a_shortage_is_asked_for_a_row_in_vain_and_says_what_is_lacking() -> None:
    """So the first program that someone types is clean under types, and its failure has the numbers."""
    space = new_space(num_blocks=5)
    short = space.allocate(tokens(20))
    assert isinstance(short, Shortage)
    for asked in ("row", "num_hit_tokens", "checkpoint"):
        with pytest.raises(OutOfBlocksError, match="'device' has 4 free blocks, 5 are needed"):
            getattr(short, asked)
    assert {field.name for field in fields(Allocation)} <= set(dir(Shortage))


def test_promise_02_swapping_that_does_not_fit_moves_nothing() -> None:
    space = new_space(num_blocks=7, num_host_blocks=4)
    rows = [prefill(space, tokens(12)), prefill(space, tokens(4, first=100))]
    with unchanged(space):
        assert space.swap_out(rows) == Shortage("device (host)", num_needed=4, num_free=3)
    space.swap_out(rows[:1])
    run_step(space)
    allocate(space, tokens(12, first=200))
    with unchanged(space):
        assert space.swap_in(rows[:1]) == Shortage("device", num_needed=3, num_free=2)


# 3. Growing takes exactly the blocks it must


@pytest.mark.interpreted
@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    growth=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    num_lookahead=st.integers(0, 5),
)
def test_promise_03_growing_takes_exactly_the_blocks_it_must(
    lengths: list[int], growth: list[int], num_lookahead: int
) -> None:
    """ceil((tokens + lookahead) / block_size) less those held, of every row."""
    space = new_space()
    rows = [allocate(space, tokens(length, first=100 * index)) for index, length in enumerate(lengths)]
    counts = growth[: len(rows)]
    expected = sum(
        -(-(length + count + num_lookahead) // 4) - -(-length // 4)
        for length, count in zip(lengths, counts, strict=True)
    )
    before = space.num_free_blocks()
    assert space.append(rows, tokens(sum(counts)), counts, num_lookahead=num_lookahead) is None
    assert before - space.num_free_blocks() == expected
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("growing", "num_copies"),
    [([0], 1), ([0, 1], 2), ([0, 1, 2], 2), ([2], 1)],
    ids=["one of three", "two of three", "all three", "a child alone"],
)
def test_promise_03_copies_on_write_are_counted_before_anything_moves(growing: list[int], num_copies: int) -> None:
    """Of all rows that share a partly filled block, the last one keeps it. One block too few is one too few."""
    space = new_space(num_blocks=12)
    row = prefill(space, tokens(6))
    rows = [row, *space.fork(row, 2).tolist()]
    others = allocate(space, tokens(4 * (9 - num_copies), first=100))
    spare = allocate(space, tokens(4, first=200))
    batch = [rows[index] for index in growing]
    assert space.num_free_blocks() == num_copies - 1
    with unchanged(space):
        assert space.append(batch, tokens(len(batch))) == Shortage("device", num_copies, num_copies - 1)
        assert not space.can_append(batch)
    space.free(spare)
    assert space.can_append(batch)
    assert space.append(batch, tokens(len(batch))) is None
    assert space.num_free_blocks() == 0
    assert len({space.block_ids(row)[1] for row in rows}) == num_copies + 1
    space.free(others)
    space.check()


def test_promise_03_reserved_slots_are_not_taken_twice() -> None:
    space = new_space()
    row = allocate(space, tokens(3), num_lookahead=6)
    assert len(space.block_ids(row)) == 3
    space.append([row], tokens(5), [5])
    assert len(space.block_ids(row)) == 3


# 4. Reuse and eviction


def test_promise_04_blocks_without_content_are_reused_first_the_newest_freed_first() -> None:
    space = new_space(num_blocks=9)
    rows = [prefill(space, tokens(3, first=100 * index)) for index in range(3)]  # one partial block each
    cache(space, tokens(4, first=400))
    (cached,) = only_pool(space).prefix_index.named_blocks().tolist()
    blocks = [space.block_ids(row)[0] for row in rows]
    for row in (rows[2], rows[0], rows[1]):
        space.free(row)
    newcomer = space.block_ids(allocate(space, tokens(32, first=500)))
    assert newcomer[:3] == [blocks[1], blocks[0], blocks[2]]
    assert newcomer[-1] == cached


def still_cached(space: BlockSpace, *prompts: int) -> list[int]:
    """How much of each prompt (7 tokens and one more) still hits."""
    return [hit(space, tokens(9, first=prompt)) for prompt in prompts]


@pytest.mark.interpreted
def test_promise_04_the_least_recently_used_is_evicted_first() -> None:
    """The last use counts, by any sequence: here a hit of another one makes the oldest the newest."""
    space = new_space(num_blocks=7)
    for prompt in (100, 200, 300):
        cache(space, tokens(8, first=prompt))
    cache(space, np.append(tokens(8, first=100), [7, 7]))  # its new third block evicts the tail of 200
    allocate(space, tokens(8, first=400))  # evicts two more: an empty one first
    assert still_cached(space, 100, 200, 300) == [8, 0, 8]


def test_promise_04_of_one_sequence_the_tail_is_evicted_before_the_head() -> None:
    space = new_space(num_blocks=6)
    cache(space, tokens(20))
    remaining = [20]
    for prompt in range(1, 5):
        allocate(space, tokens(4, first=100 * prompt))
        remaining.append(hit(space, tokens(21)))
    assert remaining == [20, 16, 12, 8, 4]


def test_promise_04_a_block_in_use_is_never_evicted() -> None:
    space = new_space(num_blocks=5)
    row = prefill(space, tokens(8))
    before = space.block_ids(row)
    for prompt in range(1, 20):
        cache(space, tokens(8, first=100 * prompt))
    assert isinstance(space.allocate(tokens(12, first=50)), Shortage)
    assert space.block_ids(row) == before
    assert hit(space, tokens(9)) == 8


def test_promise_04_eviction_is_counted() -> None:
    space = new_space(num_blocks=5)
    cache(space, tokens(16))
    allocate(space, tokens(12, first=100))
    (pool,) = space.statistics().pools
    assert (pool.num_evictions, pool.num_cached, pool.num_named) == (3, 1, 4)


# 5. Misuse (in full: test_bad_input.py)


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda space: space.free([0]), FreedSequenceError, "row 0 serves no sequence: it was freed"),
        (lambda space: space.append([0], [1]), FreedSequenceError, "row 0 serves no sequence"),
        (lambda space: space.free([99]), UnknownSequenceError, "row 99 does not exist"),
    ],
    ids=["double free", "use after free", "unknown row"],
)
def test_promise_05_misuse_is_an_error_that_names_the_owner(
    misuse: Callable[[BlockSpace], object], error: type[PagedKVError], message: str
) -> None:
    space = new_space()
    cache(space, tokens(5))
    with unchanged(space), pytest.raises(error, match=message):
        misuse(space)


def test_promise_05_a_stale_plan_does_not_touch_the_rows_next_sequence() -> None:
    """A step that was planned for a freed sequence is acknowledged after its row serves another one."""
    space = new_space(SlidingWindow(4, 4), max_sequences=1)
    space.free(allocate(space, tokens(20)))
    row = allocate(space, tokens(20))
    stale = space.plan_step()
    space.free(row)
    row = allocate(space, tokens(20, first=100))
    acknowledge(space, stale)
    assert len(held(space, row)) == 5
    space.check()
