"""What the naive server measures: plain lists of what was seen, summed up at the very end.

The definitions are those of ``docs/replay.md``, "What is measured"; the keys those of the report in JSON.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.simulation.naive_space import NaiveSpace, NaiveTable

__all__ = ["EDGES_S", "NaiveInterval", "NaiveMeasures"]

EDGES_S = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, None]
REPORTED_BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)


@dataclass
class NaiveInterval:
    """A time in which nothing changed: a step, or a wait for the next arrival."""

    now: float
    duration_s: float
    is_step: bool
    num_running: int
    num_waiting: int
    num_swapped: int
    num_sequences: int
    num_live: int
    num_cached: int
    num_free: int


@dataclass
class NaiveMeasures:
    """Everything seen so far."""

    counts: Counter[str] = field(default_factory=Counter)
    intervals: list[NaiveInterval] = field(default_factory=list)
    wastes: list[float] = field(default_factory=list)
    wastes_by_size: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in REPORTED_BLOCK_SIZES})
    wastes_contiguous: dict[str, list[float]] = field(
        default_factory=lambda: {"exact": [], "power_of_two": [], "maximum": []}
    )
    savings: list[float] = field(default_factory=list)
    queueing_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    virtual_s: float = 0.0

    def see_waste(self, space: NaiveSpace, tables: list[NaiveTable], reserved: dict[str, int]) -> None:
        """Measure one decode step.

        Args:
            space: as the step is planned.
            tables: of all running sequences.
            reserved: tokens that contiguous reservations hold, by kind.
        """
        lengths = [len(table.tokens) for table in tables]
        filled: dict[int, int] = {}
        for table in tables:
            for index, block in enumerate(table.blocks):
                filled[block] = min(space.block_size, len(table.tokens) - index * space.block_size)
        self.wastes.append(1 - sum(filled.values()) / (len(filled) * space.block_size))
        for size, wastes in self.wastes_by_size.items():
            wastes.append(1 - sum(lengths) / sum(-(-length // size) * size for length in lengths))
        for kind, num_tokens in reserved.items():
            self.wastes_contiguous[kind].append(1 - sum(lengths) / num_tokens)

    def as_dict(self, space: NaiveSpace, max_length: int) -> dict[str, Any]:
        """Sum up: the report without trace, command, config and timeline."""
        counts, steps = self.counts, [interval for interval in self.intervals if interval.is_step]
        return {
            "requests": {
                "num_requests": counts["num_requests"],
                "num_with_content": counts["num_requests"],  # requests with tokens, all of them
                **{
                    key: counts[key]
                    for key in ("num_rejected", "num_finished", "num_prompt_tokens", "num_output_tokens")
                },
            },
            "hits": {
                "num_prompt_blocks": counts["num_prompt_blocks"],
                "num_hit_blocks": counts["num_hit_blocks"],
                "block_hit_ratio": ratio(counts["num_hit_blocks"], counts["num_prompt_blocks"]),
                "num_hit_tokens": counts["num_hit_tokens"],
                "token_hit_ratio": ratio(counts["num_hit_tokens"], counts["num_admitted_tokens"]),
            },
            "steps": {
                "num_steps": len(steps),
                "num_decode_steps": counts["num_decode_steps"],
                "virtual_s": self.virtual_s,
                "busy_s": sum(step.duration_s for step in steps),
                "mean_sequences": mean([step.num_sequences for step in steps]),
                "peak_sequences": max((step.num_sequences for step in steps), default=0),
                "num_computed_tokens": counts["num_computed_tokens"],
            },
            "waste": {
                "mean": mean(self.wastes),
                "by_block_size": {str(size): mean(wastes) for size, wastes in self.wastes_by_size.items()},
                "contiguous": {kind: mean(wastes) for kind, wastes in self.wastes_contiguous.items()},
                "max_length": max_length,
            },
            "preemptions": {
                key: counts[key]
                for key in (
                    "num_recompute",
                    "num_swap",
                    "num_recomputed_tokens",
                    "num_swapped_out_blocks",
                    "num_swapped_in_blocks",
                )
            },
            "sharing": {
                "mean_saving": mean(self.savings) if self.savings else None,
                "num_decode_steps": len(self.savings),
            },
            "latency": {
                "queueing_s": percentiles(self.queueing_s),
                "first_token_s": percentiles(self.first_token_s),
                "request_s": percentiles(self.request_s),
            },
            "pools": {
                "kv": {
                    "num_blocks": space.device.num_usable,
                    "num_live": self._over_time("num_live"),
                    "num_cached": self._over_time("num_cached"),
                    "num_free": self._over_time("num_free"),
                    "num_evictions": len(space.device.eviction_ages),
                    "num_never_reused": space.device.num_never_reused,
                    "hits_by_age": histogram(space.hit_ages),
                    "evictions_by_age": histogram(space.device.eviction_ages),
                }
            },
            "intervals": self.intervals,
        }

    def _over_time(self, what: str) -> dict[str, float]:
        total_s = sum(interval.duration_s for interval in self.intervals)
        weighted = sum(getattr(interval, what) * interval.duration_s for interval in self.intervals)
        peak = max((getattr(interval, what) for interval in self.intervals), default=0)
        return {"mean": weighted / total_s if total_s else 0.0, "peak": peak}


def ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentiles(values: list[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    p50, p90, p99 = (float(np.percentile(values, percent)) for percent in (50, 90, 99))
    return {"mean": mean(values), "p50": p50, "p90": p90, "p99": p99, "max": max(values)}


def histogram(ages: list[float]) -> dict[str, list[Any]]:
    """Count ages: the first bucket holds 0 exactly, the last what exceeds every edge."""
    counts = [0] * len(EDGES_S)
    for age in ages:
        counts[next(place for place, edge in enumerate(EDGES_S) if edge is None or age <= edge)] += 1
    return {"upper_edges_s": EDGES_S, "num_blocks": counts}
