"""Rows that have something for the open plan: each listed once, told once, and never a row that is no longer there."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.contract.arrays import Int32Array
from pagedkv.space.planning import collect_touched
from pagedkv.space.rows import RUNNING, STATUS, TOUCHED, VACANT, clear_rows, new_rows, touch
from tests.space.spaces import allocate, new_space, prefill, run_step, tokens

NUM_ROWS = 9
row_numbers = st.lists(st.integers(0, NUM_ROWS - 1), max_size=20)


def collected(rows: Int32Array) -> list[int]:
    out = np.full(NUM_ROWS, -1, np.int32)
    num_touched, ascends, num_ranges = collect_touched(rows, out, np.ones((1, 2), np.int32))
    told: list[int] = out[NUM_ROWS - num_touched :].tolist()
    assert bool(ascends) == (told == sorted(told))
    assert (out[: NUM_ROWS - num_touched] == -1).all()
    assert num_ranges == 0
    return told


@pytest.mark.interpreted
@given(st.lists(st.tuples(row_numbers, row_numbers)))
def test_touched_rows_are_told_once_in_the_order_of_touching_if_they_run(
    steps: list[tuple[list[int], list[int]]],
) -> None:
    rows = new_rows(NUM_ROWS, 1)
    serials, relies_on, num_known = np.zeros((3, NUM_ROWS), np.int32)
    for touched, vacated in steps:
        rows[:, STATUS] = RUNNING
        for row in touched:
            touch(rows, row)
        clear_rows(rows, serials, relies_on, num_known, np.array(vacated, np.int32), VACANT)
        in_order = [row for row in dict.fromkeys([0, *touched]) if row not in vacated]
        assert collected(rows) == in_order
        assert np.flatnonzero(rows[:, TOUCHED]).tolist() == [0]


@pytest.mark.interpreted
def test_a_plan_names_its_rows_in_ascending_order_however_they_were_touched() -> None:
    space = new_space()
    rows = [allocate(space, tokens(5, first=10 * index)) for index in range(6)]
    run_step(space)
    for row in (rows[4], rows[1], rows[5], rows[0]):
        space.append(row, [1])
    assert space.plan_step().compute.rows.tolist() == sorted([rows[0], rows[1], rows[4], rows[5]])


@pytest.mark.interpreted
def test_a_row_that_is_freed_before_its_plan_leaves_nothing_to_the_next_sequence_in_it() -> None:
    space = new_space()
    first = allocate(space, tokens(6))
    space.free(first)
    second = allocate(space, tokens(3, first=50))
    assert second == first
    plan = space.plan_step()
    assert (plan.compute.rows.tolist(), plan.compute.ends.tolist()) == ([second], [3])
    assert plan.table_writes[0].counts.tolist() == [1]
    assert len(space.plan_step().compute.rows) == 0


@pytest.mark.interpreted
def test_entries_that_are_given_back_before_their_plan_leave_no_change_behind() -> None:
    space = new_space()
    prefill(space, tokens(4, first=50))
    row = prefill(space, tokens(4))
    space.append(row, [1])
    space.truncate(row, [4])
    assert space.plan_step().table_writes == ()
    space.check()
