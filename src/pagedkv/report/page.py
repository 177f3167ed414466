"""The page of a report. A door: the room is :mod:`pagedkv.planner.report.page`."""

from pagedkv.planner.report.page import render_report

__all__ = ["render_report"]
