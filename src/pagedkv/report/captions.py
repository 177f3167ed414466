"""Every title of the report, and the one sentence that explains it.

The definitions are those of docs/replay.md, shortened.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pagedkv.simulation.meters.meters import MISS_LABELS

__all__ = ["FIGURES", "METHOD", "MISSES", "PLOTS", "SECTIONS", "TABLES", "Caption"]


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
        "latency": "Seconds from arrival to each event; percentiles interpolate linearly",
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
