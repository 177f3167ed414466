"""Sorting by arrival, through as many temporary files as it takes, against Python's own sort."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pagedkv.planner.traces import Request
from pagedkv.planner.traces.merging import sorted_by_arrival
from tests.traces.random_requests import as_values, traces


@given(traces(in_order=False), st.integers(1, 20_000), st.integers(2, 4))
def test_any_number_of_runs_sorts_as_one_list(requests: list[Request], max_run_nbytes: int, max_num_runs: int) -> None:
    done = list(sorted_by_arrival(requests, max_run_nbytes=max_run_nbytes, max_num_runs=max_num_runs))
    assert as_values(done) == as_values(sorted(requests, key=lambda request: request.arrival_s))
    assert [request.block_size for request in done] == [requests[0].block_size] * len(requests)


@pytest.mark.parametrize("max_num_runs", [2, 3, 64])
def test_equal_arrivals_keep_their_order(max_num_runs: int) -> None:
    requests = [Request(float(number % 3), number + 1, 0) for number in range(200)]
    done = sorted_by_arrival(requests, max_run_nbytes=2_000, max_num_runs=max_num_runs)
    expected = [number + 1 for remainder in range(3) for number in range(remainder, 200, 3)]
    assert [request.input_length for request in done] == expected


def test_nothing_sorts_to_nothing() -> None:
    assert list(sorted_by_arrival([])) == []


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_files_are_bounded_and_closed_even_if_the_rest_is_not_wanted() -> None:
    before = num_open_files()
    requests = (Request(float(-number % 1000), 1, 0) for number in range(1000))
    done = sorted_by_arrival(requests, max_run_nbytes=5_000, max_num_runs=8)
    assert next(done).arrival_s == 0.0
    assert before < num_open_files() <= before + 8
    assert isinstance(done, Iterator)
    del done
    assert num_open_files() == before


def test_a_full_disk_is_reported() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            list(sorted_by_arrival((Request(0.0, 1, 0) for _ in range(1000)), max_run_nbytes=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
