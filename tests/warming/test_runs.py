"""Each request is taken once, by the process whose run it is in, or by one that has nothing else to do."""

import pytest
from hypothesis import given, strategies as st

from pagedkv.compilation.requests import Request
from pagedkv.warming.runs import Runs

pytestmark = pytest.mark.interpreted


def requests(number: int) -> list[Request]:
    return [Request("module", str(i), ()) for i in range(number)]


@given(st.integers(0, 20), st.lists(st.integers(0, 3), max_size=30))
def test_each_request_is_taken_once_in_any_order_of_processes(number: int, takers: list[int]) -> None:
    runs = Runs(requests(number), 4)
    taken = [request for taker in takers if (request := runs.take(taker)) is not None]
    assert len(taken) == min(number, len(takers)) == len(set(taken))
    assert len(runs) == number - len(taken)


def test_a_process_takes_its_own_run_in_order_and_then_the_end_of_the_longest() -> None:
    runs, each = Runs(requests(9), 3), requests(9)
    runs.take(1)
    assert [runs.take(0) for _ in range(5)] == [each[0], each[1], each[2], each[8], each[5]]


def test_nothing_is_left_after_clearing() -> None:
    runs = Runs(requests(9), 3)
    runs.clear()
    assert len(runs) == 0
    assert runs.take(1) is None
