"""Timeline: nothing is lost when intervals are joined, and there are never too many of them."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.simulation.meters import MOST_INTERVALS, Timeline


def filled(durations_s: list[float]) -> Timeline:
    """Hold the level k and count k + 1, for the k-th duration."""
    timeline = Timeline(["level"], ["count"])
    for number, duration_s in enumerate(durations_s):
        timeline.hold(duration_s, [number], [number + 1])
    return timeline


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 64.0]), max_size=40), st.sampled_from([1, 30, 100]))
def test_sums_are_kept_and_intervals_bounded(durations_s: list[float], times: int) -> None:
    durations_s = durations_s * times
    columns = filled(durations_s).columns()
    assert len(columns["duration_s"]) <= MOST_INTERVALS
    assert (columns["duration_s"] > 0).all()
    assert columns["duration_s"].sum() == pytest.approx(sum(durations_s))
    weighted = (columns["level"] * columns["duration_s"]).sum()
    assert weighted == pytest.approx(np.dot(np.arange(len(durations_s)), durations_s))
    if durations_s and durations_s[-1] > 0:
        assert columns["count"].sum() == len(durations_s) * (len(durations_s) + 1) // 2


def test_few_steps_stay_as_they_are() -> None:
    columns = filled([1.0, 2.0, 0.5]).columns()
    assert columns["duration_s"].tolist() == [1.0, 2.0, 0.5]
    assert columns["level"].tolist() == [0.0, 1.0, 2.0]
    assert columns["count"].tolist() == [1, 2, 3]


def test_what_takes_no_time_counts_with_what_follows() -> None:
    columns = filled([0.0, 0.0, 2.0]).columns()
    assert columns["duration_s"].tolist() == [2.0]
    assert columns["level"].tolist() == [2.0]
    assert columns["count"].tolist() == [6]


def test_nothing_gives_nothing() -> None:
    assert filled([]).columns()["duration_s"].tolist() == filled([0.0]).columns()["duration_s"].tolist() == []
