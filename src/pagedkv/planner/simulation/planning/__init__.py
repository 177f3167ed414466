"""Many settings on one trace, and what they tell: what ``pagedkv plan`` is made of.

In the order in which data flows::

    bounds        Bounds: what a good answer is
    request_log   RequestLog: the times and hits of each request, in place of all meters
    steadiness    Steadiness: whether a load holds: after a warm-up, for long enough, with a queue that does not grow
    figures       PointFigures: what one run comes to, in all and in parts of the trace
    arrivals      open loop, as recorded; closed loop, after the previous answer
    point         run_point(): one setting, served by the production space and scheduler
    searching     LoadSearch: the highest load that holds, by bisection; LoadLimit: what was found
    load_reasons  why a load holds or does not, and what would have to change
    effects       what one choice brings beside another, over all other choices, with its uncertainty
    decision      the setting to take, and why, in words

Points know nothing of one another, so that they run in any order and process.
"""

from pagedkv.planner.simulation.planning.bounds import Bounds
from pagedkv.planner.simulation.planning.decision import Decision, decide
from pagedkv.planner.simulation.planning.effects import Effect, PointResult, effects_of
from pagedkv.planner.simulation.planning.figures import PointFigures
from pagedkv.planner.simulation.planning.point import PlanPoint, run_point
from pagedkv.planner.simulation.planning.searching import LoadLimit, LoadSearch
from pagedkv.planner.simulation.planning.steadiness import Steadiness

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
