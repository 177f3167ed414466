"""The headline of a page: its result in a sentence; names of files are below it."""

from collections.abc import Sequence

from pagedkv.report.documents import ReportRun, seconds_source
from pagedkv.report.number_text import SECONDS

__all__ = ["headline_of", "headline_of_several"]


def headline_of(run: ReportRun) -> str:
    """Summarise one run: the share that hit, and the time to the first token.

    Times are seconds of the cost model, if the run names one.
    """
    ratio = run.replay["hits"]["token_hit_ratio"]
    hits = "The hit ratio is unknown" if ratio is None else f"{ratio:.1%} of the prompt tokens were in the cache"
    p99_s = run.replay["latency"]["first_token_s"]["p99"]
    if p99_s is None:
        return f"{hits}; no request was answered"
    source = seconds_source(run.replay)
    seconds = f" (seconds: {source})" if source else ""
    return f"{hits}; 99% of the answers began within {SECONDS.text(p99_s)}{seconds}"


def headline_of_several(runs: Sequence[ReportRun], names: Sequence[str]) -> str:
    """Name the run that hits the most, if all hit ratios are known and one is the highest."""
    ratios = [run.replay["hits"]["token_hit_ratio"] for run in runs]
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(runs):
        return f"{len(runs)} runs compared; some hit ratios are unknown"
    best = max(known)
    if known.count(best) > 1:
        return f"{len(runs)} runs compared; {known.count(best)} of them hit the most, {best:.1%} of the prompt tokens"
    return f"{len(runs)} runs compared; {names[known.index(best)]} hits the most, {best:.1%} of the prompt tokens"
