"""Many settings on one trace, and the choice among them: the parts of ``pagedkv plan``.

In the order in which data flows::

    figures       Bounds: what a good answer is; Steadiness: whether a load holds; PointFigures: one run's figures
    point         run_point(): one setting, served by the production space and scheduler, in open or closed loop
    decision      LoadSearch: the highest load that holds; effects of choices; the recommended setting, with its reasons

Points are independent, so they run in any order and process.
"""

from pagedkv.simulation.planning.decision import (
    Decision,
    Effect,
    LoadLimit,
    LoadSearch,
    PointResult,
    decide,
    effects_of,
)
from pagedkv.simulation.planning.figures import Bounds, PointFigures, Steadiness
from pagedkv.simulation.planning.point import PlanPoint, run_point

__all__ = [
    "Bounds",
    "Decision",
    "Effect",
    "LoadLimit",
    "LoadSearch",
    "PlanPoint",
    "PointFigures",
    "PointResult",
    "Steadiness",
    "decide",
    "effects_of",
    "run_point",
]
