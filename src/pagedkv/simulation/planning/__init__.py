"""Many settings on one trace, and the choice among them: the parts of ``pagedkv plan``.

In the order in which data flows::

    figures       Bounds: what a good answer is; Steadiness: whether a load holds; PointFigures: one run's figures
    resampling    resampled(): other arrivals like those of a trace
    point         run_point(): one setting, served by the production space and scheduler, in open or closed loop
    searching     LoadSearch: the highest load that holds
    interval      LoadInterval: the traffic that is sustained, with its uncertainty
    decision      effects of choices; the recommended setting, with its reasons

Points are independent, so they run in any order and process.
"""

from pagedkv.simulation.planning.decision import (
    Decision,
    Effect,
    PointResult,
    decide,
    effects_of,
)
from pagedkv.simulation.planning.figures import Bounds, PointFigures, Steadiness
from pagedkv.simulation.planning.interval import LoadInterval, interval_of
from pagedkv.simulation.planning.point import PlanPoint, run_point
from pagedkv.simulation.planning.searching import LoadLimit, LoadSearch

__all__ = [
    "Bounds",
    "Decision",
    "Effect",
    "LoadInterval",
    "LoadLimit",
    "LoadSearch",
    "PlanPoint",
    "PointFigures",
    "PointResult",
    "Steadiness",
    "decide",
    "effects_of",
    "interval_of",
    "run_point",
]
