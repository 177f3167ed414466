"""The page of a report. Public import path of :mod:`pagedkv.planner.report.page`."""

from pagedkv.planner.report.page import render_report

__all__ = ["render_report"]
