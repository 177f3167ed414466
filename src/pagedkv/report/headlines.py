"""The first lines of a page: its result in a sentence, and the memory that is needed.

The headline of a page: its result in a sentence; names of files are below it.

How much KV memory a run needs, by its documents; for its page and for terminals.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.planner.capacity.memory_need import MemoryNeed, cache_need, live_need
from pagedkv.report.documents import ReportRun, seconds_source
from pagedkv.report.key_figures import SECONDS

__all__ = ["headline_of", "headline_of_several", "need_of"]


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


def need_of(replay: Mapping[str, Any], curve: Mapping[str, Any] | None = None) -> MemoryNeed:
    """Read the need from the document of a replay, and of a curve of the same trace.

    The bytes of a token follow from the replay's only pool; with several pools the cache is unknown.
    """
    pools, block_size = replay["pools"], replay["config"].get("block_size")
    nbytes = {name: pool["block_nbytes"] for name, pool in pools.items() if pool["block_nbytes"] is not None}
    peaks = {name: int(pool["num_live"]["peak"] or 0) for name, pool in pools.items()}
    load = float(replay["config"].get("load", 1.0))
    traffic = "the recorded traffic" if load == 1 else f"{load:g} times the recorded traffic"
    live = live_need(
        peaks, {name: pool["num_blocks"] for name, pool in pools.items()}, nbytes, f"this replay of {traffic}"
    )
    if curve is None or len(pools) != 1 or not isinstance(block_size, int) or not curve["ideal_hits"]:
        return MemoryNeed(live)
    (name,) = pools
    token_nbytes = nbytes[name] / block_size if name in nbytes else None
    return MemoryNeed(live, cache_need(curve["capacity_for"], curve["block_size"], token_nbytes))
