"""Windows of recorded time, by which figures are divided: the hours of a trace, or times of day.

A window contains the requests that arrived in it. The whole trace is served, so the cache is as warm in each window
as without windows; only the counts are divided.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Float64Array, Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.clocks import FIRST_EPOCH_S

__all__ = ["MOST_WINDOWS", "Window", "WindowRule", "parse_window"]

UNITS_S: Final = MappingProxyType({"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0})
DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0
FURTHEST_ZONE_H: Final = 26
MOST_WINDOWS: Final = 10_000
LENGTH: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
TIMES: Final = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
REST: Final = "the rest"
REMEDY: Final = "`window` must be a length, as in 1h, 15m or 1d, or times of day, as in 09:00-18:00"


@dataclass(frozen=True, slots=True)
class Window:
    """One window.

    Args:
        name: name of the window, for tables.
        duration_s: seconds of the window between the first and the last arrival of the trace.
        is_whole: whether that is the whole window.
    """

    name: str
    duration_s: float
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How recorded time is divided into windows.

    Args:
        length_s: seconds of a window, or None for times of day.
        times_s: begin and end of each time of day, in seconds from midnight; all other times are one more window.
        utc_offset_h: hours by which local clocks are ahead of UTC.
    """

    length_s: float | None
    times_s: tuple[tuple[float, float], ...] = ()
    utc_offset_h: float = 0.0

    def divide(self, arrivals_s: Float64Array, origin_s: float) -> tuple[list[Window], Int32Array]:
        """Divide a trace.

        Args:
            arrivals_s: float64 ``[n]``, arrival of each request, never decreasing.
            origin_s: arrivals plus this are recorded times.

        Returns:
            The windows in order, and the window number of each request: int32 ``[n]``. O(n + windows).

        Raises:
            ConfigurationError: times of day for a trace whose clock has none, or too many windows.
        """
        if not len(arrivals_s):
            return [], np.zeros(0, np.int32)
        first_s, last_s = float(arrivals_s[0]) + origin_s, float(arrivals_s[-1]) + origin_s
        is_dated = first_s >= FIRST_EPOCH_S
        if self.length_s is None and not is_dated:
            raise ConfigurationError(
                "the times of this trace have no time of day: divide it by lengths, as in `window=1h`"
            )
        recorded_s = arrivals_s + origin_s
        if self.length_s is None:
            return self._by_time_of_day(recorded_s)
        return self._by_length(recorded_s, self.length_s, is_dated=is_dated, first_s=first_s, last_s=last_s)

    def _by_length(
        self, recorded_s: Float64Array, length_s: float, *, is_dated: bool, first_s: float, last_s: float
    ) -> tuple[list[Window], Int32Array]:
        shift_s = self.utc_offset_h * HOUR_S if is_dated else -first_s
        number = np.floor((recorded_s + shift_s) / length_s).astype(np.int64)
        first, last = int(number[0]), int(number[-1])
        if last - first >= MOST_WINDOWS:
            raise ConfigurationError(
                f"`window` makes {last - first + 1:,} windows of this trace, over {MOST_WINDOWS:,}: give longer ones"
            )
        windows = []
        for place in range(first, last + 1):
            begin_s, end_s = place * length_s - shift_s, (place + 1) * length_s - shift_s
            duration_s = max(0.0, min(end_s, last_s) - max(begin_s, first_s))
            is_whole = duration_s == end_s - begin_s
            name = self._dated(begin_s, end_s) if is_dated else f"{begin_s - first_s:g} to {end_s - first_s:g} s"
            windows.append(Window(name, duration_s, is_whole))
        return windows, (number - first).astype(np.int32)

    def _dated(self, begin_s: float, end_s: float) -> str:
        offset = timedelta(hours=self.utc_offset_h)
        begin, end = (datetime.fromtimestamp(seconds, UTC) + offset for seconds in (begin_s, end_s))
        form = "%H:%M" if not begin.second and not end.second and (end_s - begin_s) % 60 == 0 else "%H:%M:%S"
        until = end.strftime(form) if end - begin <= timedelta(days=1) else end.strftime(f"%Y-%m-%d {form}")
        return f"{begin.strftime(f'%Y-%m-%d {form}')}-{until} {self._zone}"

    @property
    def _zone(self) -> str:
        return f"UTC{self.utc_offset_h:+g}" if self.utc_offset_h else "UTC"

    def _by_time_of_day(self, recorded_s: Float64Array) -> tuple[list[Window], Int32Array]:
        local_s = recorded_s + self.utc_offset_h * HOUR_S
        of_day_s = local_s % DAY_S
        labels = np.full(len(recorded_s), len(self.times_s), np.int32)
        for place, (begin_s, end_s) in enumerate(self.times_s):
            labels[_is_within(of_day_s, begin_s, end_s)] = place
        first_s, last_s = float(local_s[0]), float(local_s[-1])
        durations_s = [sum(_overlaps_s(first_s, last_s, *times)) for times in self.times_s]
        rest_s = max(0.0, last_s - first_s - sum(durations_s))
        windows = [
            Window(f"{_named(*times)} {self._zone}", each)
            for times, each in zip(self.times_s, durations_s, strict=True)
        ]
        return [*windows, Window(REST, rest_s)], labels


def parse_window(text: str, utc_offset_h: float = 0.0) -> WindowRule:
    """Parse windows in the user's notation: a length, or times of day separated by commas.

    Raises:
        ConfigurationError: the text is neither; times overlap; the offset is impossible.

    >>> parse_window("15m").length_s, parse_window("22:00-06:00").times_s
    (900.0, ((79200.0, 21600.0),))
    """
    if not -FURTHEST_ZONE_H <= utc_offset_h <= FURTHEST_ZONE_H:
        raise ConfigurationError(f"`utc_offset_h` must be from -{FURTHEST_ZONE_H} to {FURTHEST_ZONE_H} hours")
    length = LENGTH.fullmatch(text.strip())
    if length is not None:
        length_s = float(length[1]) * UNITS_S[length[2]]
        if length_s <= 0:
            raise ConfigurationError(f"{REMEDY}; got {text!r:.60}")
        return WindowRule(length_s, utc_offset_h=utc_offset_h)
    times = tuple(_times(part.strip(), text) for part in text.split(","))
    marks = sorted(interval for begin, end in times for interval in _unwrapped(begin, end))
    if any(later[0] < earlier[1] for earlier, later in pairwise(marks)):
        raise ConfigurationError(f"the times of `window` overlap: {text!r:.60}")
    return WindowRule(None, times, utc_offset_h)


def _times(part: str, text: str) -> tuple[float, float]:
    begin_and_end = TIMES.fullmatch(part)
    if begin_and_end is None:
        raise ConfigurationError(f"{REMEDY}; got {text!r:.60}")
    begin_h, begin_m, end_h, end_m = map(int, begin_and_end.groups())
    begin_s, end_s = begin_h * HOUR_S + begin_m * 60, end_h * HOUR_S + end_m * 60
    if begin_m >= 60 or end_m >= 60 or begin_s >= DAY_S or end_s > DAY_S or begin_s == end_s % DAY_S:  # noqa: PLR2004 - minutes
        raise ConfigurationError(f"{part} is no time of day, from 00:00 to 24:00, of some length: {REMEDY}")
    return begin_s, end_s


def _unwrapped(begin_s: float, end_s: float) -> Sequence[tuple[float, float]]:
    """Return the parts of one day that a time of day covers: two if it crosses midnight."""
    return [(begin_s, end_s)] if begin_s < end_s else [(begin_s, DAY_S), (0.0, end_s)]


def _is_within(of_day_s: Float64Array, begin_s: float, end_s: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if begin_s < end_s:
        return (of_day_s >= begin_s) & (of_day_s < end_s)
    return (of_day_s >= begin_s) | (of_day_s < end_s)


def _overlaps_s(first_s: float, last_s: float, begin_s: float, end_s: float) -> Iterator[float]:
    """Yield the seconds of a time of day on each day between two times."""
    length_s = (end_s - begin_s) % DAY_S or DAY_S
    day = int(first_s // DAY_S) - 1
    while day * DAY_S + begin_s < last_s:
        start_s = day * DAY_S + begin_s
        yield max(0.0, min(start_s + length_s, last_s) - max(start_s, first_s))
        day += 1


def _named(begin_s: float, end_s: float) -> str:
    return "-".join(f"{int(each // HOUR_S):02}:{int(each % HOUR_S // 60):02}" for each in (begin_s, end_s))
