"""Renders runs for tests, and reads the page."""

from pagedkv.planner.report import ReportRun
from pagedkv.planner.report.page import render_report
from tests.report.page_reader import Page, read_page

__all__ = ["COMMAND", "render", "rendered"]

COMMAND = "pagedkv report trace.jsonl.gz -o report.html"


def render(*runs: ReportRun) -> str:
    """Render runs with a fixed version and command line."""
    return render_report(runs, version="0.1.0", command=COMMAND)


def rendered(*runs: ReportRun) -> Page:
    """Render runs, and read the page."""
    return read_page(render(*runs))
