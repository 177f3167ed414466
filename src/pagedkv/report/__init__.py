"""The HTML report: its inputs. Public import path of :mod:`pagedkv.planner.report`."""

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
