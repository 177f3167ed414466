"""Windows of recorded time: which requests are in which, held against times of day taken apart one by one."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.clocks import MOST_WINDOWS, parse_window

MIDNIGHT_S = datetime(2025, 3, 1, tzinfo=UTC).timestamp()
arrivals = st.lists(st.integers(0, 3 * 86_400), min_size=1, max_size=40).map(sorted)


@given(arrivals, st.sampled_from(["15m", "1h", "7h", "1d"]), st.sampled_from([0.0, 5.5, -3.0]))
def test_windows_of_a_length_begin_on_the_clock(seconds: list[int], text: str, offset_h: float) -> None:
    rule = parse_window(text, offset_h)
    assert rule.length_s is not None
    windows, numbers = rule.divide(np.array(seconds, np.float64), MIDNIGHT_S)
    names = []
    for second in seconds:
        local = datetime.fromtimestamp(MIDNIGHT_S + second, UTC) + timedelta(hours=offset_h)
        since = (local - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
        begin = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=since // rule.length_s * rule.length_s)
        names.append(begin.strftime("%Y-%m-%d %H:%M"))
    assert [windows[number].name[:16] for number in numbers] == names
    assert sum(window.duration_s for window in windows) == seconds[-1] - seconds[0]
    assert all(window.is_whole for window in windows[1:-1])


@given(arrivals, st.sampled_from([0.0, 2.0, -7.5]))
def test_times_of_day_and_the_rest_divide_every_request(seconds: list[int], offset_h: float) -> None:
    windows, numbers = parse_window("09:00-18:00,22:30-06:00", offset_h).divide(np.array(seconds, float), MIDNIGHT_S)
    assert [window.name.split()[0] for window in windows] == ["09:00-18:00", "22:30-06:00", "the"]
    for second, number in zip(seconds, numbers, strict=True):
        local = datetime.fromtimestamp(MIDNIGHT_S + second, UTC) + timedelta(hours=offset_h)
        minute = 60 * local.hour + local.minute
        expected = 0 if 540 <= minute < 1080 else 1 if minute >= 1350 or minute < 360 else 2
        assert number == expected
    counted = [0, 0, 0]
    for second in range(seconds[0], seconds[-1], 60):  # whole minutes, and what is left of the last
        local = datetime.fromtimestamp(MIDNIGHT_S + second, UTC) + timedelta(hours=offset_h)
        minute = 60 * local.hour + local.minute
        counted[0 if 540 <= minute < 1080 else 1 if minute >= 1350 or minute < 360 else 2] += 60
    for window, about in zip(windows, counted, strict=True):
        assert abs(window.duration_s - about) <= 60 * 8


def test_a_trace_without_dates_is_divided_from_its_first_request() -> None:
    windows, numbers = parse_window("10s").divide(np.array([2.0, 11.9, 12.0, 40.0]), 0.0)
    assert numbers.tolist() == [0, 0, 1, 3]
    assert [window.name for window in windows] == ["0 to 10 s", "10 to 20 s", "20 to 30 s", "30 to 40 s"]
    assert [(window.duration_s, window.is_whole) for window in windows][2:] == [(10.0, True), (8.0, False)]


def test_times_of_day_need_dates_and_windows_a_bound() -> None:
    with pytest.raises(ConfigurationError, match="have no time of day"):
        parse_window("09:00-18:00").divide(np.array([0.0, 9.0]), 0.0)
    with pytest.raises(ConfigurationError, match=f"86,401 windows of this trace, over {MOST_WINDOWS:,}"):
        parse_window("1s").divide(np.array([0.0, 86_400.0]), MIDNIGHT_S)


@pytest.mark.parametrize(
    "text", ["", "1", "1 week", "0h", "9-18", "09:00-09:00", "25:00-26:00", "09:60-10:00", "09:00-12:00,11:00-13:00"]
)
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="window"):
        parse_window(text)
