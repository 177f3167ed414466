"""Sessions with clocks of their own, merged into one order of arrival.

A trace of sessions has the time of each request within its session, but not the beginnings of the sessions. Here
session k (from 0, in file order, including those without requests) begins at ``k * interval_s``. A gap between two
requests of a session may be cut, because long pauses of users would dominate a cache under study.

A heap holds the next request of each session under way. Sessions are read only until the next one begins after the
earliest request in the heap, so memory is that of the sessions that overlap.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request

__all__ = ["interleave_sessions"]

NUM_DECIMALS: Final = 6
"""Arrivals are rounded to the microsecond, so that equal times from different sums are equal."""


def interleave_sessions(
    sessions: Iterable[Iterable[Request]], interval_s: float, max_gap_s: float | None = None
) -> Iterator[Request]:
    """Merge sessions into one order of arrival; equal arrivals come in the order of their sessions.

    Args:
        sessions: each session's requests, in order of arrival on the session's clock, which starts at 0.
        interval_s: seconds from the start of one session to that of the next, at least 0.
        max_gap_s: longest time between two requests of a session, in seconds; longer ones are cut to it. None: gaps
            are kept. The time from a session's start to its first request is always kept.

    Returns:
        the requests, with arrivals on the common clock that never decrease. O(log of sessions under way) each.

    Raises:
        ConfigurationError: a time is negative or not finite.
    """
    _require_time("the interval between sessions", interval_s)
    if max_gap_s is not None:
        _require_time("the longest gap within a session", max_gap_s)
    return _merged(iter(sessions), interval_s, max_gap_s)


def _merged(sessions: Iterator[Iterable[Request]], interval_s: float, max_gap_s: float | None) -> Iterator[Request]:
    # Entries are ordered by arrival and number, so requests are never compared.
    under_way: list[tuple[float, int, Request, Iterator[Request]]] = []
    for number in count():
        start_s = interval_s * number
        while under_way and under_way[0][0] < start_s:
            yield _advance(under_way)
        session = next(sessions, None)
        if session is None:
            break
        requests = _on_common_clock(session, start_s, max_gap_s)
        first = next(requests, None)
        if first is not None:
            heapq.heappush(under_way, (first.arrival_s, number, first, requests))
    while under_way:
        yield _advance(under_way)


def _advance(under_way: list[tuple[float, int, Request, Iterator[Request]]]) -> Request:
    """Return the earliest request, and replace it by the next one of its session."""
    _, number, earliest, requests = under_way[0]
    following = next(requests, None)
    if following is None:
        heapq.heappop(under_way)
    else:
        heapq.heapreplace(under_way, (following.arrival_s, number, following, requests))
    return earliest


def _on_common_clock(session: Iterable[Request], start_s: float, max_gap_s: float | None) -> Iterator[Request]:
    """Shift a session's requests to its start, and cut its gaps."""
    cut_s = arrival_s = 0.0
    local_s = None
    for request in session:
        if max_gap_s is not None and local_s is not None:
            cut_s += max(0.0, request.arrival_s - local_s - max_gap_s)
        local_s = request.arrival_s
        # The larger one: a rounding error must not let arrivals fall.
        arrival_s = max(arrival_s, round(start_s + local_s - cut_s, NUM_DECIMALS))
        yield replace(request, arrival_s=arrival_s)


def _require_time(name: str, value_s: float) -> None:
    if not (value_s >= 0 and math.isfinite(value_s)):
        raise ConfigurationError(f"{name} must be at least 0 seconds, and finite, got {value_s}")
