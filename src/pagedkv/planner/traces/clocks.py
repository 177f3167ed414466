"""Times of requests: units and clocks, missing and coarse times, the order of arrival, windows of recorded time.

Arrival times of files become seconds. Each format has a unit. If a file counts from 1970, its first number determines
the unit instead, since present times in seconds, milli-, micro- and nanoseconds since 1970 differ widely. Dates are
read as ISO 8601; without a zone they are UTC. A ``time_unit`` that the user states overrides all of this. A gap of a
year between two requests is refused, since it comes from a change of units or from damage.

Arrivals of a file without times are generated; coarse ones are spread over the span of a stamp.

In all formats, arrivals never decrease. Equal arrivals are allowed, and keep file order. An unsorted trace would send
requests of a replay into the past. Sorting holds more than one row in memory, so it needs an option.

Figures are divided by windows of recorded time: the hours of a trace, or times of day. A window contains the requests
that arrived in it. The whole trace is served, so the cache is as warm in each window as without windows; only the
counts are divided.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Float64Array, Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

TIME_UNITS: Final = MappingProxyType({"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9})
"""Number of each unit in a second."""
ISO: Final = "ISO 8601"
FIRST_EPOCH_S: Final = 10**9
LAST_EPOCH_S: Final = 10**10
"""Seconds since 1970 in the years 2001 and 2286: present times in other units lie outside."""
LONGEST_WAIT_S: Final = 366 * 86_400
LONGEST_LEAD_S: Final = 3600
"""A trace whose first request comes later than this was not timed from its own beginning."""
FEWEST_WHOLE: Final = 20
"""From this number of times on, a note reports that all of them are whole seconds."""
EQUAL_SHARE: Final = 4
"""Times are in bursts if a quarter of them equal the time before."""
COARSE_S: Final = 0.5
"""If no step of the clock is smaller, rounding gives equal times to requests that arrived apart."""
REMEDY: Final = "State the unit of the times (`time_unit=s`, ms, us or ns), or repair the row"
DATE_ALONE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
PLACES: Final = 9
MOST_SEEN: Final = 2**20
"""Number of times remembered of an unsorted file, where equal times need not be adjacent."""
MOST_DIGITS: Final = 30  # digits of a whole number, which stays exact; a float of nanoseconds would not


class ArrivalClock:
    """Reads the times of one file.

    Args:
        declared: the unit that the format, or the name of the column, states: one of ``TIME_UNITS``.
        given: the unit that the user states, which overrides everything else.
    """

    def __init__(self, declared: str = "s", given: str | None = None) -> None:
        self._declared = declared
        self._given = given
        self._unit = given or ""
        self._latest_s: float | None = None
        self._num = self._num_equal = 0
        self._is_whole = True
        self._seen_s: set[float] = set()
        self._least_step_s = math.inf

    @property
    def notes(self) -> list[str]:
        """List warnings about the times: whether they are rounded to seconds or come in other coarse steps."""
        if self._num < FEWEST_WHOLE or self._num_equal * EQUAL_SHARE < self._num:
            return []
        bursts = f"{self._num_equal:,} of {self._num:,} requests come together with the one before"
        cause = f"so {bursts}: bursts that may come from rounding"
        if self._is_whole:
            return [f"times are whole seconds, {cause}; `span_s=1` spreads them over their second"]
        if COARSE_S <= self._least_step_s < math.inf:
            step = f"{self._least_step_s:.3g}"
            return [f"times come in steps of {step} s and more, {cause}; `span_s={step}` spreads them over their step"]
        return []

    @property
    def description(self) -> str:
        """The unit of the times that were read, as text for users; without the unit before the first time."""
        return f"times in {self._unit}" if self._latest_s is not None else "times"

    def seconds(self, line: Line, value: float | str, *, any_order: bool = False) -> float:
        """Turn a time into seconds.

        Raises:
            TraceError: it is no time, or far from the previous one.
        """
        arrival_s = self._in_seconds(line, value)
        latest_s, self._latest_s = self._latest_s, arrival_s
        self._num += 1
        if latest_s is not None and arrival_s != latest_s:
            self._least_step_s = min(self._least_step_s, abs(arrival_s - latest_s))
        self._num_equal += arrival_s in self._seen_s if any_order else arrival_s == latest_s
        if any_order and len(self._seen_s) < MOST_SEEN:
            self._seen_s.add(arrival_s)
        self._is_whole = self._is_whole and arrival_s.is_integer()
        if latest_s is not None and not any_order and abs(arrival_s - latest_s) > LONGEST_WAIT_S:
            days = abs(arrival_s - latest_s) / 86_400
            raise line.fault(f"arrives {days:,.0f} days from the request before it, at {value!r:.60}", REMEDY)
        return arrival_s

    def _in_seconds(self, line: Line, value: float | str) -> float:
        number = _number(value)
        if number is None:
            self._unit = ISO
            return _iso_seconds(line, str(value))
        if not self._unit or self._unit == ISO:
            self._unit = _epoch_unit(number) or self._declared
        return number / TIME_UNITS[self._unit]


def require_time_unit(unit: str | None) -> None:
    """Refuse an unknown unit. Raises ConfigurationError."""
    if unit is not None and unit not in TIME_UNITS:
        raise ConfigurationError(f"`time_unit` must be one of {', '.join(TIME_UNITS)}, got {unit!r}")


class Rebased:
    """Shifts a trace to begin at 0 if its first request comes over an hour after its clock began. Iterate once.

    Args:
        requests: the requests, on their clock.

    Attributes:
        origin_s: seconds that were subtracted from arrivals, set by the first request; recorded times are arrivals
            plus ``origin_s``.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self.origin_s = 0.0

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests on the shifted clock."""
        for number, request in enumerate(self._requests):
            if not number and request.arrival_s > LONGEST_LEAD_S:
                self.origin_s = request.arrival_s
            moved_s = round(request.arrival_s - self.origin_s, PLACES)
            yield replace(request, arrival_s=moved_s) if self.origin_s else request


def rebased(requests: Iterable[Request]) -> Iterator[Request]:
    """Shift a trace to begin at 0, as :class:`Rebased` does."""
    return iter(Rebased(requests))


def _number(value: float | str) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.isdecimal() and len(value) <= MOST_DIGITS else float(value)
    except ValueError:
        return None


def _epoch_unit(number: float) -> str | None:
    for unit, parts in TIME_UNITS.items():
        if FIRST_EPOCH_S <= number / parts < LAST_EPOCH_S:
            return unit
    return None


def _iso_seconds(line: Line, text: str) -> float:
    tidy = re.sub(r"^\[|\]$", "", text.strip()).replace(",", ".").removesuffix(" UTC")
    if DATE_ALONE.fullmatch(tidy):
        reason = f"{text!r:.60} is a date without a time of day, as sums over a day have"
        raise line.fault(reason, "Give a log with a row and a time for each request, or generate arrivals (`arrivals`)")
    try:
        when = datetime.fromisoformat(tidy)
    except ValueError as error:
        raise line.fault(
            f"{text!r:.60} is no time", "Give seconds, or a date as in 2024-05-01T12:30:00.250Z"
        ) from error
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


POISSON: Final = "poisson"
SPREAD_PLACES: Final = 6
MOST_WAITING: Final = 2**16
"""Requests of one stamp that wait in memory; more of them are spread in batches of this size."""


@dataclass(frozen=True, slots=True)
class GeneratedArrivals:
    """Generates random independent arrivals: a Poisson process with a fixed seed.

    Args:
        per_s: mean number of requests a second, positive and finite.

    Raises:
        ConfigurationError: the rate is not positive, or not finite.
    """

    per_s: float

    def __post_init__(self) -> None:
        if not (self.per_s > 0 and math.isfinite(self.per_s)):
            raise ConfigurationError(f"`arrivals=poisson:RATE` must be requests a second, above 0, got {self.per_s}")

    @property
    def description(self) -> str:
        """How these times were generated, as text for users."""
        return f"generated arrivals: at random, {self.per_s:g} a second"

    @property
    def note(self) -> str:
        """A note about generated times, in one sentence."""
        rate = f"at random, {self.per_s:g} a second"
        return f"arrivals are generated, {rate}: every figure of recorded traffic rests on them"

    def applied_to(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests with these arrivals, in their order; the first arrives at 0."""
        random = np.random.default_rng(0)
        arrival_s = 0.0
        for request in requests:
            yield replace(request, arrival_s=round(arrival_s, SPREAD_PLACES))
            arrival_s += random.exponential(1 / self.per_s)


def parse_arrivals(text: str) -> GeneratedArrivals:
    """Parse arrivals in the user's notation. Raises ConfigurationError.

    >>> parse_arrivals("poisson:2.5")
    GeneratedArrivals(per_s=2.5)
    """
    kind, _, rate = text.partition(":")
    try:
        per_s = float(rate)
    except ValueError:
        per_s = math.nan
    if kind != POISSON or math.isnan(per_s):
        raise ConfigurationError(
            f"`arrivals` must be poisson:RATE, as in poisson:2.5 for 2.5 a second; got {text!r:.60}"
        )
    return GeneratedArrivals(per_s)


def spread_stamps(requests: Iterable[Request], span_s: float) -> Iterator[Request]:
    """Spread requests with equal arrivals evenly over the span of their stamp.

    Args:
        requests: in order of arrival.
        span_s: seconds that a stamp covers; less where the next stamp is sooner.

    Returns:
        the requests in their order, the first of each stamp unmoved. Memory holds the requests of one stamp.

    Raises:
        ConfigurationError: the span is not positive, or not finite.
    """
    if not (span_s > 0 and math.isfinite(span_s)):
        raise ConfigurationError(f"`span_s` must be a number of seconds above 0, got {span_s}")
    return _spread(requests, span_s)


def _spread(requests: Iterable[Request], span_s: float) -> Iterator[Request]:
    group: list[Request] = []
    for request in requests:
        if group and (request.arrival_s != group[0].arrival_s or len(group) == MOST_WAITING):
            yield from _apart(group, min(span_s, request.arrival_s - group[0].arrival_s))
            group = []
        group.append(request)
    yield from _apart(group, span_s)


def _apart(group: list[Request], span_s: float) -> Iterator[Request]:
    for place, request in enumerate(group):
        yield request if not place else replace(request, arrival_s=request.arrival_s + span_s * place / len(group))


class ArrivalOrder:
    """Checks that the arrivals of one clock never decrease."""

    def __init__(self) -> None:
        self._latest_s = 0.0
        self._latest_line = 0

    def follow(self, line: Line, arrival_s: float, where: str = "") -> None:
        """Check the next arrival, in seconds.

        Args:
            line: the line of the arrival.
            where: the request within the line, if the line has several.

        Raises:
            TraceError: it is earlier than the previous arrival.
        """
        if arrival_s < self._latest_s:
            before = "the one before" if self._latest_line == line.number else f"line {self._latest_line}"
            sort = f"`sorted_by_arrival({shlex.quote(line.path)})`"
            raise line.fault(
                f"{where}arrives at {arrival_s} s, after {before} at {self._latest_s} s",
                f"Put the requests in order of arrival: {sort}",
            )
        self._latest_s = arrival_s
        self._latest_line = line.number


UNITS_S: Final = MappingProxyType({"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0})
DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0
FURTHEST_ZONE_H: Final = 26
MOST_WINDOWS: Final = 10_000
LENGTH: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
TIMES: Final = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
REST: Final = "the rest"
WINDOW_REMEDY: Final = "`window` must be a length, as in 1h, 15m or 1d, or times of day, as in 09:00-18:00"


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
            raise ConfigurationError(f"{WINDOW_REMEDY}; got {text!r:.60}")
        return WindowRule(length_s, utc_offset_h=utc_offset_h)
    times = tuple(_times(part.strip(), text) for part in text.split(","))
    marks = sorted(interval for begin, end in times for interval in _unwrapped(begin, end))
    if any(later[0] < earlier[1] for earlier, later in pairwise(marks)):
        raise ConfigurationError(f"the times of `window` overlap: {text!r:.60}")
    return WindowRule(None, times, utc_offset_h)


def _times(part: str, text: str) -> tuple[float, float]:
    begin_and_end = TIMES.fullmatch(part)
    if begin_and_end is None:
        raise ConfigurationError(f"{WINDOW_REMEDY}; got {text!r:.60}")
    begin_h, begin_m, end_h, end_m = map(int, begin_and_end.groups())
    begin_s, end_s = begin_h * HOUR_S + begin_m * 60, end_h * HOUR_S + end_m * 60
    if begin_m >= 60 or end_m >= 60 or begin_s >= DAY_S or end_s > DAY_S or begin_s == end_s % DAY_S:  # noqa: PLR2004 - minutes
        raise ConfigurationError(f"{part} is no time of day, from 00:00 to 24:00, of some length: {WINDOW_REMEDY}")
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
