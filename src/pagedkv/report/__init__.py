"""The HTML report: what one run of a replay measured, or several side by side, on one self-contained page.

In the order in which data flows::

    documents      the results of a replay and of a capacity curve, as plain dicts
    key_figures    the summary figures of a run, and the formats of numbers; headlines: a result in a sentence
    captions       every title, and the sentence that explains it
    timelines      parts of pages, one module a family: blocks and requests over time,
                   ages of hits and evictions, percentiles of latencies, preemptions,
    memory         waste, sharing, pools and tiers,
    capacity       hit ratio over capacity,
    settings       configuration and command lines, and parts by tenant and window,
    comparison     several runs side by side
    plan_page      the page of a plan, from its document
    drawing        matplotlib's SVG, in the colours of the page
    elements       tables, plots and sections, which the template lays out
    page           puts the parts in order; templates/ has the page itself

It does no input or output, and uses nothing else of this library but its errors. Only :mod:`documents`,
:mod:`key_figures` and :mod:`headlines` may be imported without the ``report`` extra (matplotlib, Jinja2).
"""

from pagedkv.report.documents import Curve, Replay, ReportRun

__all__ = ["Curve", "Replay", "ReportRun"]
