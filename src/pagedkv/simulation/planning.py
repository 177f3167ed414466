"""Simulation of many settings on one trace. Public import path of :mod:`pagedkv.planner.simulation.planning`."""

from pagedkv.planner.simulation.planning import (
    Bounds,
    Decision,
    Effect,
    LoadLimit,
    LoadSearch,
    PlanPoint,
    PointFigures,
    PointResult,
    Steadiness,
    decide,
    effects_of,
    run_point,
)

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
