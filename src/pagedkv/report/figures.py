"""The summary figures of a run, the formats of all numbers, every title, and a result in a sentence.

Each quantity has one format, used in tables, tiles and differences alike. Each title has one sentence that explains it,
by the definitions of docs/replay.md, shortened. All depend on the documents, not on pages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from pagedkv.planner.capacity.curve import MemoryNeed, cache_need, live_need
from pagedkv.report.documents import Pool, ReportRun, has_known_content, seconds_source
from pagedkv.simulation.meters import MISS_LABELS


@dataclass(frozen=True, slots=True)
class Caption:
    """A title and a sentence."""

    title: str
    sentence: str


FIGURES: Final = MappingProxyType(
    {
        "num_requests": Caption("Requests", "Requests of the trace, the rejected ones included."),
        "num_rejected": Caption("Rejected", "Requests that could not be served even alone."),
        "token_hit_ratio": Caption(
            "Hit ratio by token", "Prompt tokens found in the cache at first admission, of all prompt tokens."
        ),
        "block_hit_ratio": Caption(
            "Hit ratio by block", "Prompt blocks found in the cache at first admission, of those that could be."
        ),
        "waste": Caption("Waste", "Slots without a token, of all slots of the blocks in use; mean over decode steps."),
        "first_token_p99": Caption(
            "First token, p99", "99% of the requests had their first token within this time after arrival."
        ),
        "queueing_p99": Caption(
            "Queueing, p99", "99% of the requests were first admitted within this time after arrival."
        ),
        "request_p99": Caption("Whole request, p99", "99% of the requests were finished within this time."),
        "first_token_mean": Caption("First token, mean", "Mean time from arrival to the first token."),
        "preemptions": Caption(
            "Preemptions", "Times that a running request lost its blocks, by recompute and by swap."
        ),
        "recomputed": Caption("Recomputed tokens", "Tokens that were computed before, and computed again."),
        "swapped": Caption("Swapped blocks", "Blocks moved to the host pool and back, both counted."),
        "peak_live": Caption(
            "Peak live blocks", "Most blocks in use at one time; of several pools, the sum of each one's own peak."
        ),
        "peak_live_nbytes": Caption("Peak live memory", "The same blocks in GiB, for the given model."),
        "evictions": Caption("Evictions", "Cached blocks that were reused for new content."),
        "never_reused": Caption("Never reused", "Evicted blocks that had not been hit once, of all evicted blocks."),
        "mean_saving": Caption(
            "Sharing saving", "Blocks saved because sequences of one request share them, of the blocks without sharing."
        ),
        "mean_sequences": Caption("Mean sequences", "Sequences that run, mean over steps."),
        "virtual_s": Caption("Virtual time", "Seconds of the simulated clock from start to end."),
    }
)
SECTIONS: Final = MappingProxyType(
    {
        "time": "Over time",
        "memory": "Memory",
        "latency": "Latency and preemption",
        "ages": "Reuse and eviction",
        "capacity": "Capacity",
        "settings": "Configuration",
        "figures": "Key figures",
        "overlaid": "Overlaid",
    }
)
PLOTS: Final = MappingProxyType(
    {
        "blocks": Caption(
            "Blocks over time",
            "Live blocks are referred to by block tables; cached blocks are free but can still be found; the others "
            "are free and empty. Means over each interval.",
        ),
        "requests": Caption(
            "Requests over time", "Requests that run, wait, or are swapped out, means over each interval."
        ),
        "hits": Caption(
            "Hit ratio over time",
            "Hit tokens of the prompt tokens first admitted in each interval, one dot each; the line bridges intervals "
            "without an admission.",
        ),
        "waste": Caption(
            "Waste by block size",
            "Share of the reserved slots that hold no token: with blocks of each size, and if each sequence "
            "reserved its memory in one piece.",
        ),
        "latency": Caption(
            "Latencies", "Seconds from arrival to first admission, to the first token, and to the end of the request."
        ),
        "hits_by_age": Caption(
            "Hits by age",
            "Seconds since a hit block was last released, by upper edge; 0 is a block still in use.",
        ),
        "evictions_by_age": Caption(
            "Evictions by age", "Seconds from a block's last release to its eviction, by upper edge."
        ),
        "curve": Caption(
            "Hit ratio over capacity",
            "Block hits by capacity of the cache: of the replay's policy, of the best other one at its size, of an "
            "optimum that knows the requests to come, and of a cache without bounds. With tiers, of all media together "
            "as if loads took no time. The table has all policies.",
        ),
        "gaps": Caption(
            "Where misses come from",
            "Policy gap: what the offline optimum, which knows the requests to come, hits more at the same size; "
            "capacity gap: what a cache without bounds hits beyond that; content ceiling: references to content never "
            "seen before, which no cache hits.",
        ),
        "compared_capacity": Caption(
            "Hit ratio over capacity",
            "Block hits of the run's own policy, else of LRU, by capacity of the cache in tokens; the large hollow "
            "mark is the replay's own hit ratio.",
        ),
        "compared_marks": Caption(
            "Hit ratio over capacity",
            "Each replay's own hit ratio, at the tokens that its pool holds; no capacity curve was measured.",
        ),
        "compared_live": Caption(
            "Live blocks over time", "Blocks in use, of all pools together, means over each interval."
        ),
        "compared_waste": Caption(
            "Waste by block size",
            "Share of the slots that hold no token if each sequence had its own blocks of each size.",
        ),
        "compared_latency": Caption(
            "Latency percentiles",
            "Seconds from arrival to first admission, to the first token, and to the end; logarithmic where none is 0.",
        ),
    }
)
TABLES: Final = MappingProxyType(
    {
        "figures": "Key figures; differences are to the first run, marked as better or worse where that is clear",
        "latency": "Seconds, by the cost model {}: from arrival to each event; percentiles interpolate linearly",
        "preemptions": "Preemptions, and their cost",
        "waste": "Share of slots without a token",
        "misses": "Prompt tokens that did not hit at first admission, by cause",
        "pools": "Each pool: blocks live, cached and free, mean over time and peak",
        "pool_nbytes": "The same in GiB",
        "ages": "Blocks by seconds since their last release",
        "curve": "Hit ratio by block at each measured capacity, and the gaps to the ideal",
        "settings": "Settings",
        "tier_hits": "Prompt tokens that hit at first admission, by the medium that had them",
        "tiers": "Each tier: loads, loads replaced by faster computing, and GiB written, read and kept",
    }
)
MEANINGS: Final = {
    "capacity": "It was cached, and then evicted, or dropped with a window or a state.",
    "changed": "It follows a cached beginning: new text after shared text, or an edited prompt.",
    "keys": "It is cached under another salt, adapter, medium or weights epoch.",
    "short": "The remaining tokens fill no block, or include the last token, which is always computed.",
    "new": "Neither it nor any other block after the same beginning was ever stored.",
    "being_computed": "The step that computes it had not run yet.",
    "unknown": "Never stored, or evicted so long ago that its record is gone.",
    "other": "The cache was reset, or a step had failed.",
}
MISSES: Final = MappingProxyType(
    {cause: Caption(label.capitalize(), MEANINGS[cause]) for cause, label in MISS_LABELS.items()}
)
METHOD: Final = (
    "The requests of the trace ran through the production block space on a virtual clock: block tables, hits, sharing, "
    "preemption, swaps and evictions are decided by production code; the duration of a step is the formula of the "
    "cost model. Nothing was measured on a GPU. docs/replay.md in the source of pagedkv defines every figure."
)
NONE: Final = "none"
"""Shown in place of a missing value; screen readers can read it."""
NBYTES_OF_GIB: Final = 2**30
MANY_SECONDS: Final = 100
MILLI: Final = 1e-3
FEW_PER_S: Final = 10
PREFIXES: Final = (("T", 1e12), ("G", 1e9), ("M", 1e6))
LARGEST_PREFIXED: Final = 1e15


@dataclass(frozen=True, slots=True)
class Unit:
    """A format for a quantity.

    Args:
        write: formats a value.
        write_size: formats the size of a difference, without its sign.
    """

    write: Callable[[float], str]
    write_size: Callable[[float], str]

    def text(self, value: float | None) -> str:
        """Format a value; ``NONE`` without one.

        >>> COUNT.text(1234567), RATIO.text(0.1842), SECONDS.text(0.0125), SECONDS.text(None)
        ('1,234,567', '18.42%', '12.5 ms', 'none')
        """
        return NONE if value is None else self.write(value)

    def difference(self, difference: float) -> str:
        """Format a difference with its sign.

        >>> COUNT.difference(-3), RATIO.difference(0.0125), SECONDS.difference(1.5), COUNT.difference(0)
        ('-3', '+1.25 points', '+1.50 s', '0')
        """
        return f"{'+' if difference > 0 else '-' if difference < 0 else ''}{self.write_size(abs(difference))}"


def relative(difference: float, first: float) -> str:
    """Format a difference as a share of the first value; empty if that value is 0.

    >>> relative(5, 20), relative(5, 0)
    ('+25.0%', '')
    """
    return f"{difference / first:+,.1%}" if first else ""


def rate(per_s: float) -> str:
    """Format a number a second: as a whole number, unless it is small.

    >>> rate(12345.6), rate(0.152), rate(0)
    ('12,346', '0.15', '0')
    """
    return f"{per_s:,.0f}" if per_s >= FEW_PER_S else f"{per_s:.2g}"


def compact(value: float) -> str:
    """Format a number in little space, for an axis.

    >>> compact(0.25), compact(250_000), compact(2_500_000), compact(1e20)
    ('0.25', '250,000', '2.5M', '1e+20')
    """
    if abs(value) >= LARGEST_PREFIXED:
        return f"{value:.3g}"
    for prefix, scale in PREFIXES:
        if abs(value) >= scale:
            return f"{value / scale:g}{prefix}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def edge(upper_s: float | None, lower_s: float | None) -> str:
    """Format the bucket of ages from above ``lower_s`` up to ``upper_s`` seconds.

    >>> edge(0, None), edge(5, 2), edge(None, 10000)
    ('0', '2-5', '> 10,000')
    """
    if upper_s is None:
        return f"> {lower_s or 0:,g}"
    return f"{upper_s:,g}" if lower_s is None else f"{lower_s:,g}-{upper_s:,g}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else f"{value:,}"


def _seconds(value: float) -> str:
    if value >= MANY_SECONDS:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= MILLI:
        return f"{value / MILLI:.1f} ms"
    return f"{value / MILLI**2:.0f} us" if value else "0 s"


def memory_text(gib: float, digits: int = 1) -> str:
    """Return memory with its unit: MiB where GiB of as many digits would be 0.0.

    >>> memory_text(12.34), memory_text(0.02), memory_text(0.0)
    ('12.3 GiB', '20.5 MiB', '0.0 GiB')
    """
    is_small = 0 < gib < 10**-digits
    return f"{1024 * gib:,.3g} MiB" if is_small else f"{gib:,.{digits}f} GiB"


def _gib(nbytes: float) -> str:
    return memory_text(nbytes / NBYTES_OF_GIB, 2)


COUNT: Final = Unit(_count, _count)
MEAN: Final = Unit(lambda value: f"{value:,.1f}", lambda value: f"{value:,.1f}")
RATIO: Final = Unit(lambda value: f"{value:.2%}", lambda value: f"{100 * value:,.2f} points")
SECONDS: Final = Unit(_seconds, _seconds)
GIB: Final = Unit(_gib, _gib)


class Better(Enum):
    """The direction in which a figure improves."""

    MORE = 1
    LESS = -1
    NEITHER = 0


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One figure of a run.

    Args:
        key: key of its caption.
        unit: formats it.
        value: reads it from a run; None if the run has none.
        better: the direction in which it improves, other things being equal; neither for blocks, whose size may differ.
        in_tiles: whether it is shown at the top of the page of one run.
    """

    key: str
    unit: Unit
    value: Callable[[ReportRun], float | None]
    better: Better = Better.NEITHER
    in_tiles: bool = False

    @property
    def caption(self) -> Caption:
        """Its title and sentence."""
        return FIGURES[self.key]

    def verdict(self, difference: float) -> str:
        """Return whether a difference to another run is "better", "worse", or neither: an empty text."""
        judged = difference * self.better.value
        return "better" if judged > 0 else "worse" if judged < 0 else ""


def level_nbytes(pool: Pool, num_blocks: float | None) -> float | None:
    """Bytes of a number of a pool's blocks; None if either is unknown."""
    nbytes = pool["block_nbytes"]
    return None if nbytes is None or num_blocks is None else nbytes * num_blocks


def _total(parts: list[float | None]) -> float | None:
    """Sum values; None if any of them is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if parts and len(known) == len(parts) else None


def _pools(run: ReportRun) -> list[Pool]:
    return list(run.replay["pools"].values())


def _num_evictions(run: ReportRun) -> int:
    return sum(pool["num_evictions"] for pool in _pools(run))


def _never_reused(run: ReportRun) -> float | None:
    num_evictions = _num_evictions(run)
    if not num_evictions or not has_known_content(run.replay):
        return None
    return sum(pool["num_never_reused"] for pool in _pools(run)) / num_evictions


def _preemptions(run: ReportRun) -> int:
    return run.replay["preemptions"]["num_recompute"] + run.replay["preemptions"]["num_swap"]


def _swapped(run: ReportRun) -> int:
    preemptions = run.replay["preemptions"]
    return preemptions["num_swapped_out_blocks"] + preemptions["num_swapped_in_blocks"]


KEY_FIGURES: Final = (
    KeyFigure("num_requests", COUNT, lambda run: run.replay["requests"]["num_requests"], in_tiles=True),
    KeyFigure("num_rejected", COUNT, lambda run: run.replay["requests"]["num_rejected"], Better.LESS),
    KeyFigure("token_hit_ratio", RATIO, lambda run: run.replay["hits"]["token_hit_ratio"], Better.MORE, in_tiles=True),
    KeyFigure("block_hit_ratio", RATIO, lambda run: run.replay["hits"]["block_hit_ratio"], Better.MORE, in_tiles=True),
    KeyFigure("waste", RATIO, lambda run: run.replay["waste"]["mean"], Better.LESS, in_tiles=True),
    KeyFigure(
        "first_token_p99",
        SECONDS,
        lambda run: run.replay["latency"]["first_token_s"]["p99"],
        Better.LESS,
        in_tiles=True,
    ),
    KeyFigure("first_token_mean", SECONDS, lambda run: run.replay["latency"]["first_token_s"]["mean"], Better.LESS),
    KeyFigure("queueing_p99", SECONDS, lambda run: run.replay["latency"]["queueing_s"]["p99"], Better.LESS),
    KeyFigure("request_p99", SECONDS, lambda run: run.replay["latency"]["request_s"]["p99"], Better.LESS),
    KeyFigure("preemptions", COUNT, _preemptions, Better.LESS, in_tiles=True),
    KeyFigure("recomputed", COUNT, lambda run: run.replay["preemptions"]["num_recomputed_tokens"], Better.LESS),
    KeyFigure("swapped", COUNT, _swapped),
    KeyFigure("peak_live", COUNT, lambda run: _total([p["num_live"]["peak"] for p in _pools(run)]), in_tiles=True),
    KeyFigure(
        "peak_live_nbytes",
        GIB,
        lambda run: _total([level_nbytes(pool, pool["num_live"]["peak"]) for pool in _pools(run)]),
        in_tiles=True,
    ),
    KeyFigure("evictions", COUNT, _num_evictions),
    KeyFigure("never_reused", RATIO, _never_reused),
    KeyFigure("mean_saving", RATIO, lambda run: run.replay["sharing"]["mean_saving"], Better.MORE, in_tiles=True),
    KeyFigure("mean_sequences", MEAN, lambda run: run.replay["steps"]["mean_sequences"]),
    KeyFigure("virtual_s", SECONDS, lambda run: run.replay["steps"]["virtual_s"], Better.LESS),
)
"""In the order of display. Tiles leave out optional figures (GiB, sharing) that the run does not have."""
FULL: Final = 0.9
IDLE: Final = 0.5
"""Shares of a pool that are live at its peak: from ``FULL`` on it is short of blocks, up to ``IDLE`` it has too
many."""


def pool_balance(pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe a pool that was full while another was idle; an empty text if there is none.

    Cached blocks count as idle only in the pool that is not full: they serve no running request.
    """
    peaks = {name: pool["num_live"]["peak"] or 0 for name, pool in pools.items()}
    shares = {name: peaks[name] / max(1, pool["num_blocks"]) for name, pool in pools.items()}
    if not shares:
        return ""
    full = max(shares, key=lambda name: shares[name])
    idle = min(shares, key=lambda name: shares[name])
    if shares[full] < FULL or shares[idle] > IDLE:
        return ""
    blocks = ",".join(f"{name}={pool['num_blocks'] + 1}" for name, pool in pools.items())
    return (
        f"Pool {full} was {shares[full]:.0%} live at its peak, {idle} {shares[idle]:.0%}: to move memory from one to "
        f"the other, give each its own number, now `num_blocks={blocks}`"
    )


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
