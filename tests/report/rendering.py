"""Renders runs for tests, and reads the page."""

from unittest.mock import patch

from pagedkv.report import ReportRun, drawing
from pagedkv.report.page import render_report
from tests.report.page_reader import Page, read_page

__all__ = ["COMMAND", "render", "rendered", "words_of"]

COMMAND = "pagedkv report trace.jsonl.gz -o report.html"


def render(*runs: ReportRun) -> str:
    """Render runs with a fixed version and command line."""
    return render_report(runs, version="0.1.0", command=COMMAND)


def rendered(*runs: ReportRun) -> Page:
    """Render runs, and read the page."""
    return read_page(render(*runs))


def words_of(*runs: ReportRun) -> Page:
    """Render runs without their drawings, which take seconds, and read the page."""
    empty = '<svg viewBox="0 0 1 1" aria-hidden="true"></svg>'
    with patch.object(drawing, "draw", lambda *_: empty):
        return rendered(*runs)
