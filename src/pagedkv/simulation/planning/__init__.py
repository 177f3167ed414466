"""Many settings on one trace, and the choice among them: the parts of ``pagedkv plan``.

In the order in which data flows::

    bounds        Bounds: the definition of a good answer
    steadiness    Steadiness: whether a setting holds a load: after a warm-up, for long enough, without a growing queue
    figures       PointFigures: the figures of one run, in all and in parts of the trace
    arrivals      open loop, as recorded; closed loop, after the previous answer
    point         run_point(): one setting, served by the production space and scheduler
    searching     LoadSearch: the highest load that holds, by bisection; LoadLimit: its result
    load_reasons  the reason why a load holds or fails, and a remedy
    effects       the gain of one choice over another, over all other choices, with its uncertainty
    decision      the recommended setting, and the reasons, in words

Points are independent, so they run in any order and process.
"""

from pagedkv.simulation.planning.bounds import Bounds
from pagedkv.simulation.planning.decision import Decision, decide
from pagedkv.simulation.planning.effects import Effect, PointResult, effects_of
from pagedkv.simulation.planning.figures import PointFigures
from pagedkv.simulation.planning.point import PlanPoint, run_point
from pagedkv.simulation.planning.searching import LoadLimit, LoadSearch
from pagedkv.simulation.planning.steadiness import Steadiness

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
