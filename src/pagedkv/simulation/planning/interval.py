"""LoadInterval: the sustained traffic of a setting with its uncertainty, and what that is made of.

Three things are uncertain. The search ends between a load that holds and one that does not, so it is continued to 2 %.
The seconds have the error of their fit: the search is run again with all of them longer by it, and shorter. And other
requests will come: the search is run on resampled arrivals, whose traffic has a spread. The last two are independent,
so their logarithms are added as squares, on either side; the search's own is added to the upper side, since its lower
end holds.

The interval of the arrivals is one of 90 %, by Student's t. How far a machine's seconds change from one day to another,
or by requests of other sizes than those of the fit, is in none of these.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Final, TypeAlias

from pagedkv.planner.results import Result
from pagedkv.simulation.planning.figures import PointFigures
from pagedkv.simulation.planning.point import PlanPoint
from pagedkv.simulation.planning.searching import LoadLimit, LoadSearch, limit_of

Runs: TypeAlias = Sequence[tuple[float, PointFigures]]
"""The runs of a search: each load, and its figures."""
OWN: Final = "own"
SLOW: Final = "slow"
FAST: Final = "fast"
STUDENT_90: Final = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Student's t, two-sided, 90 %, with 1, 2, ... degrees of freedom."""
NORMAL_90: Final = 1.645
FEWEST_RESAMPLES: Final = 3
STRIDE: Final = 2.0
FINEST: Final = 1 / 4
"""Where searches end that are no resamples, in eighths of a doubling: 2 %."""


def points_again(point: PlanPoint, error: float | None, num_resamples: int) -> dict[str, PlanPoint]:
    """Return the settings to be searched again, by name.

    Args:
        point: the setting.
        error: relative error of its seconds; None: it is unknown, and not searched with.
        num_resamples: how many resamples of the arrivals.
    """
    points = {OWN: point} | {str(seed): replace(point, resample=seed) for seed in range(num_resamples)}
    if error is not None:
        points[SLOW] = replace(point, costs=point.costs.scaled(1 + error))
        points[FAST] = replace(point, costs=point.costs.scaled(1 - error))
    return points


def search_again(name: str, load: float) -> LoadSearch:
    """Begin the search of such a setting at the load that held: resamples, of which the spread counts, coarsely."""
    if name == OWN:
        return LoadSearch(load, 1.0, FINEST)
    return LoadSearch(load, STRIDE, FINEST if name in {SLOW, FAST} else 1.0)


@dataclass(frozen=True, slots=True)
class LoadInterval(Result):
    """Good answers a second that a setting sustains.

    Args:
        low_per_s, likeliest_per_s, high_per_s: the interval, and what held in the search.
        error: relative error of the seconds, to either side; None: it is unknown, and no part of the interval.
        num_resamples: resampled arrivals for which a load held; with fewer than three they are no part of it.
        search: the share by which the search leaves the upper end open.
        slower, faster: the shares by which longer and shorter seconds move the traffic.
        arrivals: the share by which other arrivals move it, to either side.
    """

    low_per_s: float
    likeliest_per_s: float
    high_per_s: float
    error: float | None
    num_resamples: int
    search: float
    slower: float
    faster: float
    arrivals: float

    def text(self, answers: str) -> str:
        """Return the interval in words; ``answers`` are those that count, such as "answers a second"."""
        return f"holds {self.low_per_s:.3g} to {self.high_per_s:.3g} {answers}, {self.likeliest_per_s:.3g} likeliest"

    @property
    def reasons(self) -> tuple[str, str]:
        """Why the interval is as wide as it is, and what would narrow it: two sentences."""
        seconds = (
            "the error of the seconds is unknown and no part of it"
            if self.error is None
            else f"seconds that are off by {self.error:.1%} move it by -{self.slower:.0%} and +{self.faster:.0%}"
        )
        arrivals = (
            f"other arrivals like these by {self.arrivals:.0%} to either side ({self.num_resamples} resamples)"
            if self.num_resamples >= FEWEST_RESAMPLES
            else "other arrivals are no part of it"
        )
        why = f"the interval: {seconds}; {arrivals}; the search leaves {self.search:.0%} open"
        return why, f"what would narrow it: {self._remedy}"

    @property
    def _remedy(self) -> str:
        if self.error is None:
            return "seconds with a known error (pagedkv calibrate), which may also move it"
        remedies = {
            "seconds with a smaller error (pagedkv calibrate, on an idle machine, by steps of all sizes)": max(
                self.slower, self.faster
            ),
            "a longer log": self.arrivals,
            "loads between those that were run": self.search,
        }
        return max(remedies, key=lambda remedy: remedies[remedy])


def interval_of(runs: Runs, again: Mapping[str, Runs], error: float | None) -> LoadInterval:
    """Combine the searches of a setting.

    Args:
        runs: the setting's own search, in which a load held and a higher one did not.
        again: further searches: ``OWN`` continues that of the setting, ``SLOW`` and ``FAST`` are those by the error, if
            it is known, and others by resampled arrivals.
        error: relative error of the seconds.
    """
    limit, likeliest = _traffic([*runs, *again.get(OWN, ())])
    assert limit.held is not None, "a search without an answer"
    assert limit.ended is not None, "as above"
    search = limit.ended / limit.held
    high = likeliest * search
    slow = fast = 1.0
    if error is not None:
        slow = min(1.0, _traffic(again[SLOW])[1] / likeliest)
        fast_limit, held = _traffic(again[FAST])
        open_above = 1.0 if fast_limit.held is None or fast_limit.ended is None else fast_limit.ended / fast_limit.held
        fast = max(1.0, held * open_above / high)
    traffic = [_traffic(each)[1] for name, each in again.items() if name not in {OWN, SLOW, FAST}]
    logarithms = [math.log(each) for each in traffic if each]
    spread = _half_width(logarithms)
    return LoadInterval(
        low_per_s=likeliest * math.exp(-math.hypot(-math.log(slow), spread)) if slow else 0.0,
        likeliest_per_s=likeliest,
        high_per_s=high * math.exp(math.hypot(math.log(fast), spread)),
        error=error,
        num_resamples=len(logarithms),
        search=search - 1,
        slower=1 - slow,
        faster=fast - 1,
        arrivals=math.expm1(spread),
    )


def _traffic(runs: Runs) -> tuple[LoadLimit, float]:
    """Return the limit of a search, and the good answers a second at the highest load that held; 0 if none did."""
    limit = limit_of((load, figures.steadiness.verdict) for load, figures in runs)
    return limit, next((figures.steadiness.good_per_s for load, figures in runs if load == limit.held), 0.0)


def _half_width(logarithms: Sequence[float]) -> float:
    """Return half of the 90 % interval of a further value; 0 for too few."""
    if len(logarithms) < FEWEST_RESAMPLES:
        return 0.0
    freedom = len(logarithms) - 1
    student = STUDENT_90[freedom - 1] if freedom <= len(STUDENT_90) else NORMAL_90
    return student * stdev(logarithms)
