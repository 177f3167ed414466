"""The interval of the sustained traffic: what widens it, by hand; and how it is told."""

import math
from statistics import stdev

import pytest

from pagedkv.simulation.planning import Bounds, PointFigures, decide, interval_of
from pagedkv.simulation.planning.figures import FAILS, HOLDS
from pagedkv.simulation.planning.interval import FAST, OWN, SLOW, search_again
from tests.simulation.planning.results import figures, result

SECONDS = 6000.0


def search(*, held: float | None, ended: float, per_s: float = 4.0) -> list[tuple[float, PointFigures]]:
    """Make up the end of a search; of a load 1 there are ``per_s`` good answers a second."""
    fails = [(ended, figures(verdict=FAILS))]
    if held is None:
        return fails
    good = round(held * per_s * SECONDS / 8)
    return [*fails, (held, figures((good,) * 8, offered_s=SECONDS, verdict=HOLDS))]


OWN_RUNS = search(held=1.0, ended=1.09)


def test_without_an_error_and_resamples_it_is_what_the_search_leaves_open() -> None:
    found = interval_of(OWN_RUNS, {}, None)
    assert (found.low_per_s, found.likeliest_per_s) == (4.0, 4.0)
    assert found.high_per_s == pytest.approx(4 * 1.09)
    why, remedy = found.reasons
    assert why == (
        "the interval: the error of the seconds is unknown and no part of it; other arrivals are no part of it; the "
        "search leaves 9% open"
    )
    assert "pagedkv calibrate" in remedy


def test_the_own_search_is_continued_to_two_percent() -> None:
    finer = [(1.04, figures((round(1.04 * 4 * SECONDS / 8),) * 8, offered_s=SECONDS, verdict=HOLDS))]
    found = interval_of(OWN_RUNS, {OWN: [*finer, (1.06, figures(verdict=FAILS))]}, None)
    assert found.likeliest_per_s == pytest.approx(4 * 1.04, rel=0.001)
    assert found.high_per_s == pytest.approx(4 * 1.06, rel=0.001)
    assert "leaves 2% open" in found.reasons[0]
    for name, most in ((OWN, 1.025), (SLOW, 1.025), (FAST, 1.025), ("3", 1.1)):
        search, loads = search_again(name, 1.0), {}
        while (load := search.next_load()) is not None:
            loads[load] = load < 1.05
            search.record(HOLDS if load < 1.05 else FAILS)
        held = max(load for load, holds in loads.items() if holds)
        assert 1 < min(load for load, holds in loads.items() if not holds) / held < most


def test_seconds_move_each_side_by_the_search_with_them() -> None:
    again = {SLOW: search(held=0.917, ended=1.0), FAST: search(held=1.19, ended=1.3)}
    found = interval_of(OWN_RUNS, again, 0.12)
    assert found.low_per_s == pytest.approx(4 * 0.917, rel=0.01)
    assert found.high_per_s == pytest.approx(4 * 1.3, rel=0.01)
    assert "off by 12.0% move it by -8% and +19%" in found.reasons[0]
    assert "a smaller error" in found.reasons[1]
    same = interval_of(OWN_RUNS, {SLOW: OWN_RUNS, FAST: OWN_RUNS}, 0.01)
    assert same.low_per_s == 4.0
    assert same.high_per_s == pytest.approx(4.36)
    never = interval_of(OWN_RUNS, {SLOW: search(held=None, ended=0.5), FAST: OWN_RUNS}, 0.2)
    assert never.low_per_s == 0


def test_resampled_arrivals_widen_both_sides() -> None:
    """By Student's t of their traffic, not of their loads: a busier resample holds fewer times its traffic."""
    again = {str(n): search(held=1.0, ended=1.09, per_s=per_s) for n, per_s in enumerate((3.0, 4.0, 5.0, 4.0))}
    found = interval_of(OWN_RUNS, again, None)
    half = 2.353 * stdev(map(math.log, (3, 4, 5, 4)))
    assert found.num_resamples == 4
    assert found.low_per_s == pytest.approx(4 * math.exp(-half), rel=0.01)
    assert found.high_per_s == pytest.approx(4 * 1.09 * math.exp(half), rel=0.01)
    two = interval_of(OWN_RUNS, dict(list(again.items())[:2]), None)
    assert (two.low_per_s, two.num_resamples) == (4.0, 2)
    of_both = interval_of(OWN_RUNS, again | {SLOW: search(held=0.917, ended=1.0), FAST: OWN_RUNS}, 0.12)
    assert of_both.low_per_s == pytest.approx(4 * math.exp(-math.hypot(half, math.log(0.917))), rel=0.01)
    steady = {str(n): search(held=2.0, ended=2.18, per_s=2.0) for n in range(12)}
    assert interval_of(OWN_RUNS, steady, None).arrivals == 0
    assert "a longer log" in interval_of(OWN_RUNS, again | {SLOW: OWN_RUNS, FAST: OWN_RUNS}, 0.01).reasons[1]


def test_the_headline_and_the_reasons_tell_it() -> None:
    results = [result(found, load, gpu="h100") for load, found in OWN_RUNS]
    interval = interval_of(OWN_RUNS, {SLOW: search(held=0.841, ended=0.917), FAST: search(held=1.19, ended=1.3)}, 0.15)
    decision = decide(results, Bounds(ttft_s=1.0), is_searched=True, interval=interval)
    assert decision.headline.startswith(
        "Stay with h100: holds 3.36 to 5.2 answers a second within the bounds, 4 likeliest, the recorded traffic (1.09 "
    )
    assert decision.reasons[:2] == interval.reasons
    without = decide(results, Bounds(), is_searched=True)
    assert "sustains 4 answers a second, the recorded traffic" in without.headline
