"""The HTML report: what it takes. A door: the room is :mod:`pagedkv.planner.report`."""

from pagedkv.planner.report import (
    Curve,
    Replay,
    ReportRun,
)

__all__ = [
    "Curve",
    "Replay",
    "ReportRun",
]
