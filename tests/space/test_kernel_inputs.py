"""Slot mappings and lists of pages, against the tables read position by position in plain Python."""

import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv import (
    Allocation,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    StepPlan,
)
from pagedkv.contract.plan import TokenRanges
from pagedkv.errors import ConfigurationError, FreedSequenceError, SequenceError, StepError
from tests.space.spaces import acknowledge, allocate, new_space, prefill, run_step, tokens, unchanged

GROUPS: tuple[GroupSpec, ...] = (FullAttention(4), SlidingWindow(6, 2, num_sink_tokens=3), ChunkedLocal(8, 4))


def expected_slots(space: BlockSpace, plan: StepPlan, group: int) -> list[int]:
    """The slot of each position, from the row's block ids."""
    size = space.block_size(group)
    ranges = zip(plan.compute.rows.tolist(), plan.compute.starts.tolist(), plan.compute.ends.tolist(), strict=True)
    return [
        space.block_ids(row, group)[position // size] * size + position % size
        for row, start, end in ranges
        for position in range(start, end)
    ]


def expected_pages(space: BlockSpace, row: int, group: int) -> tuple[list[int], int, int]:
    """The blocks with content behind the last gap, the tokens in the last of them, and the first position."""
    size, num_tokens = space.block_size(group), space.num_tokens(row)
    ids = space.block_ids(row, group)[: -(-num_tokens // size)]
    first = len(ids)
    while first > 0 and ids[first - 1]:
        first -= 1
    pages = ids[first:]
    return pages, (num_tokens - (len(ids) - 1) * size) if pages else 0, min(first * size, num_tokens)


def step_at_random(space: BlockSpace, rows: list[int], rng: random.Random) -> None:
    """Change a few rows: new ones, growth with reserved slots, forks, drafts given back, rows given up."""
    for _ in range(rng.randint(1, 4)):
        what = rng.choice(["allocate", "append", "append", "fork", "free", "truncate"])
        if what == "allocate" or not rows:
            prompt = tokens(rng.randint(1, 30), first=rng.choice([0, 500]))
            allocation = space.allocate(prompt, num_lookahead=rng.randint(0, 9))
            if isinstance(allocation, Allocation):
                rows.append(allocation.row)
            continue
        row = rng.choice(rows)
        if what == "append":
            count = rng.randint(1, 9)
            space.append(row, tokens(count), [count], num_lookahead=rng.randint(0, 5))
        elif what == "fork" and len(rows) < 12:
            rows += space.fork(row).tolist()
        elif what == "free":
            rows.remove(row)
            space.free(row)
        elif what == "truncate":
            space.truncate(row, [space.num_tokens(row)])


@pytest.mark.interpreted
@given(st.randoms(use_true_random=False))
def test_slots_and_pages_are_those_of_the_tables(rng: random.Random) -> None:
    space = new_space(*GROUPS, num_blocks=400)
    rows: list[int] = []
    in_flight: list[StepPlan] = []
    for _ in range(8):
        step_at_random(space, rows, rng)
        plan = space.plan_step()
        in_flight.append(plan)
        for group in range(len(GROUPS)):
            slots = space.slot_mapping(plan, group)
            assert slots.dtype == np.int64
            assert slots.tolist() == expected_slots(space, plan, group)
            lists = space.page_lists(rows, group)
            assert all(array.dtype == np.int32 for array in (lists.indptr, lists.indices, lists.last_page_len))
            for place, row in enumerate(rows):
                pages = lists.indices[lists.indptr[place] : lists.indptr[place + 1]].tolist()
                listed = pages, lists.last_page_len[place], lists.starts[place]
                assert listed == expected_pages(space, row, group)
            assert lists.indptr[-1] == len(lists.indices)
        while len(in_flight) > rng.randint(0, 2):
            acknowledge(space, in_flight.pop(0))


def test_pages_follow_a_window() -> None:
    """Window 8, blocks of 4, a sink block: after 30 tokens positions 22 and later are needed, of 5 and later blocks."""
    space = new_space(SlidingWindow(8, 4, num_sink_tokens=2))
    row = prefill(space, tokens(30))
    lists = space.page_lists(row)
    assert space.block_ids(row) == [1, 0, 0, 0, 0, 6, 7, 8]
    assert (lists.indices.tolist(), lists.starts.tolist(), lists.last_page_len.tolist()) == ([6, 7, 8], [20], [2])
    assert lists.indptr.tolist() == [0, 3]
    assert repr(lists) == "PageLists(1 rows, 3 pages)"


def test_a_chunk_that_has_just_begun_has_no_pages() -> None:
    space = new_space(ChunkedLocal(8, 4))
    row = prefill(space, tokens(8))
    lists = space.page_lists(row)
    assert (lists.indptr.tolist(), lists.last_page_len.tolist(), lists.starts.tolist()) == ([0, 0], [0], [8])


def test_no_rows_have_no_pages() -> None:
    assert new_space().page_lists([]).indptr.tolist() == [0]


def test_slots_and_pages_of_a_recurrent_state_are_refused() -> None:
    space = new_space(FullAttention(4), RecurrentState(4), num_blocks={"device": 9, "state": 9})
    row = allocate(space, tokens(4))
    plan = space.plan_step()
    for ask in (lambda: space.slot_mapping(plan, 1), lambda: space.page_lists(row, 1)):
        with pytest.raises(ConfigurationError, match="group 1 is a recurrent state"):
            ask()
    with pytest.raises(ConfigurationError, match="no group 2"):
        space.slot_mapping(plan, 2)


def test_pages_of_a_freed_row_are_refused() -> None:
    space = new_space()
    row = prefill(space, tokens(4))
    space.free(row)
    with pytest.raises(FreedSequenceError):
        space.page_lists(row)


def test_slots_are_told_of_the_last_plan_alone() -> None:
    space = new_space()
    row = allocate(space, tokens(4))
    first = space.plan_step()
    space.append(row, [1])
    second = space.plan_step()
    with pytest.raises(StepError, match="slots of step 1 cannot be computed: the last in flight is 2"):
        space.slot_mapping(first)
    assert space.slot_mapping(StepPlan.from_buffer(second.buffer.tobytes())).tolist() == [8]
    acknowledge(space, first, second)
    with pytest.raises(StepError, match="none is in flight"):
        space.slot_mapping(second)


def test_slots_of_a_plan_whose_rows_have_changed_are_refused() -> None:
    """Rather than those of another sequence, or of a block that the step does not write."""
    for change in ("free", "reuse", "truncate", "copy on write", "mark computed"):
        space = new_space()
        row = prefill(space, tokens(6))
        space.append(row, [1])
        plan = space.plan_step()
        assert space.slot_mapping(plan).tolist() == [2 * 4 + 2]
        if change == "copy on write":
            space.fork(row)
            space.append(row, [2])
        elif change == "truncate":
            space.truncate(row, [4])
        elif change == "mark computed":
            space.mark_computed(row)
        else:
            space.free(row)
        if change == "reuse":
            assert allocate(space, tokens(7, first=50)) == row
        with (
            unchanged(space),
            pytest.raises(SequenceError, match=f"row {row} does not hold positions 6 to 7 of step 2"),
        ):
            space.slot_mapping(plan)


def test_growing_on_does_not_keep_a_plan_from_telling_its_slots() -> None:
    space = new_space()
    row = prefill(space, tokens(3))
    space.append(row, [1])
    plan = space.plan_step()
    space.append(row, [2])
    assert space.slot_mapping(plan).tolist() == [1 * 4 + 3]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9))))
def test_offsets_and_positions_of_a_step(ranges: list[tuple[int, int]]) -> None:
    starts = [start for start, _ in ranges]
    ends = [start + length for start, length in ranges]
    compute = TokenRanges(*(np.array(column, np.int32) for column in (range(len(ranges)), starts, ends)))
    positions = [position for start, end in zip(starts, ends, strict=True) for position in range(start, end)]
    assert compute.positions().tolist() == positions
    assert compute.num_tokens == len(positions) == compute.offsets()[-1]
    assert np.diff(compute.offsets()).tolist() == [length for _, length in ranges]
    assert compute.positions().dtype == compute.offsets().dtype == np.int32


def test_what_a_space_and_a_plan_say_of_themselves() -> None:
    space = new_space(num_host_blocks=30)
    first, second = (prefill(space, tokens(10, first=100 * index)) for index in range(2))
    space.swap_out(second)
    space.fork(first)
    space.append(first, [1], num_lookahead=4)
    plan = space.plan_step()
    assert repr(plan) == (
        "StepPlan(step 3: 1 rows compute 1 tokens, 5 table writes, 1 new blocks, 1 copies, 3 swaps out, 0 in)"
    )
    assert repr(plan.compute) == "TokenRanges(1 rows, 1 tokens)"
    assert [repr(part) for part in (*plan.table_writes, *plan.copies, *plan.new_blocks)] == [
        "TableWrites(group 0: 2 rows, 5 entries)",
        "BlockMoves('device', 1 blocks)",
        "NewBlocks('device', 1 blocks)",
    ]
    assert repr(space) == (
        "BlockSpace(device 5 of 100 blocks used, 92 free, 0 of them cached; "
        "2 running, 1 swapped out, 1 steps in flight)"
    )
    assert "0 rows compute 0 tokens" in repr(run_step(new_space()))
