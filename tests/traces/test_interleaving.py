"""Sessions on one clock, against plain lists; and how many of them are held."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces import Request
from pagedkv.planner.traces.merging import interleave_sessions

TIMES = st.lists(st.integers(0, 40_000), max_size=6).map(sorted)  # milliseconds


def session_of(times_s: list[float], name: str = "s") -> list[Request]:
    """A session whose requests are numbered by their lengths."""
    return [Request(time_s, position + 1, 0, session=name) for position, time_s in enumerate(times_s)]


def arrivals(requests: Iterator[Request]) -> list[tuple[str | None, float]]:
    return [(request.session, request.arrival_s) for request in requests]


@given(st.lists(TIMES, max_size=8), st.integers(0, 30_000), st.none() | st.integers(0, 20_000))
def test_interleaving_is_sorting_by_time_then_session(
    times_of_sessions: list[list[int]], interval_ms: int, max_gap_ms: int | None
) -> None:
    expected = []
    for number, times in enumerate(times_of_sessions):
        gaps = [later - earlier for earlier, later in pairwise(times)]
        shown = [gap if max_gap_ms is None else min(gap, max_gap_ms) for gap in gaps]
        now = number * interval_ms + (times[0] if times else 0)
        for position in range(len(times)):
            now += shown[position - 1] if position else 0
            expected.append((now, number, position + 1))
    done = interleave_sessions(
        [session_of([ms / 1000 for ms in times], str(number)) for number, times in enumerate(times_of_sessions)],
        interval_ms / 1000,
        None if max_gap_ms is None else max_gap_ms / 1000,
    )
    found = [(request.arrival_s, int(request.session or ""), request.input_length) for request in done]
    assert found == [(ms / 1000, number, position) for ms, number, position in sorted(expected)]


@given(st.lists(st.lists(st.floats(0, 1e6), max_size=6).map(sorted), max_size=8), st.floats(0, 1e3), st.floats(0, 1e3))
def test_arrivals_never_fall_whatever_the_numbers(
    times_of_sessions: list[list[float]], interval_s: float, max_gap_s: float
) -> None:
    done = list(interleave_sessions([session_of(times) for times in times_of_sessions], interval_s, max_gap_s))
    assert len(done) == sum(map(len, times_of_sessions))
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(done))


def test_the_wait_before_the_first_request_is_kept_and_gaps_are_cut() -> None:
    sessions = [session_of([100.0, 101.0, 500.0, 500.5], "a"), [], session_of([0.0], "b")]
    done = arrivals(interleave_sessions(sessions, 60.0, 60.0))
    assert done == [("a", 100.0), ("a", 101.0), ("b", 120.0), ("a", 161.0), ("a", 161.5)]


def test_only_sessions_under_way_are_held() -> None:
    num_started = num_ended = most = 0

    def session() -> Iterator[Request]:
        nonlocal num_started, num_ended, most
        num_started += 1
        most = max(most, num_started - num_ended)
        yield from session_of([0.0, 1.0, 2.5])
        num_ended += 1

    done = interleave_sessions((session() for _ in range(100)), 1.0)
    assert num_started == 0
    assert len(list(done)) == 300
    assert (num_started, num_ended) == (100, 100)
    assert most == 3  # those that began in the last 2.5 s, the newest included


@pytest.mark.parametrize("interval_s", [-1.0, float("nan"), float("inf")])
def test_a_time_must_be_one(interval_s: float) -> None:
    with pytest.raises(ConfigurationError, match=f"interval between sessions must be .*, got {interval_s}"):
        interleave_sessions([], interval_s)
    with pytest.raises(ConfigurationError, match=f"longest gap within a session must be .*, got {interval_s}"):
        interleave_sessions([], 1.0, interval_s)
