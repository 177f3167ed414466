"""The HTML report: what one run of a replay measured, or several side by side, on one self-contained page.

In the order in which data flows::

    documents      the results of a replay and of a capacity curve, as plain dicts
    figures        the summary figures of a run, the formats of numbers, every title, a result in a sentence
    drawing        matplotlib's SVG, in the colours of the page; tables, plots and sections, which the template lays out
    sections       parts of the page of a run: over time, ages, latencies, memory, settings, tenants and windows
    capacity       hit ratio over capacity
    page           puts the parts in order, for one run or several side by side; templates/ has the page itself
    plan_page      the page of a plan, from its document

It does no input or output. Only :mod:`documents` and :mod:`figures` may be imported without the ``report`` extra
(matplotlib, Jinja2).
"""

from pagedkv.report.documents import Curve, Replay, ReportRun

__all__ = ["Curve", "Replay", "ReportRun"]
