"""Each entry is taken once, by the process whose run it is in, or by one that has nothing else to do."""

import pytest
from hypothesis import given, strategies as st

from pagedkv.warming.parts import Entry
from pagedkv.warming.runs import Runs

pytestmark = pytest.mark.interpreted


def entries(number: int) -> list[Entry]:
    return [Entry(f"module.loop_{i}", ()) for i in range(number)]


@given(st.integers(0, 20), st.lists(st.integers(0, 3), max_size=30))
def test_each_entry_is_taken_once_in_any_order_of_processes(number: int, takers: list[int]) -> None:
    runs = Runs(entries(number), 4)
    taken = [entry for taker in takers if (entry := runs.take(taker)) is not None]
    assert len(taken) == min(number, len(takers)) == len(set(taken))
    assert len(runs) == number - len(taken)


def test_a_process_takes_its_own_run_in_order_and_then_the_end_of_the_longest() -> None:
    runs, each = Runs(entries(9), 3), entries(9)
    runs.take(1)
    assert [runs.take(0) for _ in range(5)] == [each[0], each[1], each[2], each[8], each[5]]


def test_nothing_is_left_after_clearing() -> None:
    runs = Runs(entries(9), 3)
    runs.clear()
    assert len(runs) == 0
    assert runs.take(1) is None
