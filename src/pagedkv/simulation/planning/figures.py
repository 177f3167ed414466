"""PointFigures: the figures of one run, in all and in parts of the trace.

Differences between two settings are paired by parts. Hits are divided by eighths of the requests in order of arrival;
answers, and the good ones among them, by eighths of the answers in order of their ends, with the seconds that each
eighth spans.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Float64Array, Int32Array
from pagedkv.simulation.cluster import ClusterFigures
from pagedkv.simulation.planning.bounds import Bounds
from pagedkv.simulation.planning.request_parts import PartFigures
from pagedkv.simulation.planning.steadiness import Steadiness, steadiness_of
from pagedkv.simulation.request_log import RequestLog

__all__ = ["NUM_PARTS", "ClusterSummary", "Part", "PointFigures", "figures_of"]

Flags: TypeAlias = npt.NDArray[np.bool_]

NUM_PARTS: Final = 8
PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run.

    Args:
        num_prompt_tokens, num_hit_tokens: tokens of an eighth of the requests, by arrival.
        num_finished, num_good, span_s: answers, good answers and seconds of an eighth of the answers, by their ends.
    """

    num_prompt_tokens: int
    num_hit_tokens: int
    num_finished: int
    num_good: int
    span_s: float


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """Figures that only a cluster has.

    Args:
        imbalance: the largest number of tokens that a replica computed in a minute, over the mean of all replicas.
        busy: fraction of the time until the last arrival in which a step ran, the mean of all replicas.
        num_by_reason: the router's decisions by reason.
        num_lost_batches: batches of events that were lost; num_snapshots: snapshots that were sent instead.
    """

    imbalance: float
    busy: float
    num_by_reason: dict[str, int]
    num_lost_batches: int
    num_snapshots: int

    @classmethod
    def of(cls, figures: ClusterFigures) -> "ClusterSummary":
        """Summarize the figures of a run."""
        return cls(
            figures.imbalance, figures.busy, figures.num_by_reason, figures.num_lost_batches, figures.num_snapshots
        )


@dataclass(frozen=True, slots=True)
class PointFigures:
    """The figures of one run.

    Args:
        num_requests, num_rejected, num_finished, num_good: requests; good ones are within the bounds.
        has_content: whether the trace has content.
        num_prompt_tokens, num_hit_tokens: tokens at the first admissions.
        num_output_tokens: tokens of finished requests, all sequences.
        span_s: seconds from the first arrival to the last answer.
        offered_s: seconds from the first arrival to the last one.
        busy_s: seconds of steps.
        num_steps: number of steps.
        num_preemptions: preemptions.
        ttft_s, tpot_s, itl_s: mean (not for ``itl_s``), p50, p90 and p99; None if there are none.
        waited_s: seconds in which requests waited, by cause (``RequestLog.waited_s``).
        peak_live: most blocks of requests in flight, by pool; of a cluster the sum of its replicas' peaks.
        parts: the same in parts.
        steadiness: whether the load holds.
        divided: the same by tenant and by window of recorded time, if there are any.
        cluster: figures that only a cluster has; None: one server. Seconds of steps are then those of all replicas.
    """

    num_requests: int
    num_rejected: int
    num_finished: int
    num_good: int
    has_content: bool
    num_prompt_tokens: int
    num_hit_tokens: int
    num_output_tokens: int
    span_s: float
    offered_s: float
    busy_s: float
    num_steps: int
    num_preemptions: int
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    itl_s: dict[str, float | None]
    waited_s: dict[str, float]
    peak_live: dict[str, int]
    parts: tuple[Part, ...]
    steadiness: Steadiness
    divided: tuple[PartFigures, ...] = ()
    cluster: ClusterSummary | None = None

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that hit; None if the trace has no content."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.has_content and self.num_prompt_tokens else None

    @property
    def throughput_per_s(self) -> float:
        """Answers a second."""
        return self.num_finished / self.span_s if self.span_s else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Answers a second within the bounds."""
        return self.num_good / self.span_s if self.span_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_output_tokens / self.span_s if self.span_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; :meth:`from_dict` reads them back."""
        values = asdict(self)
        if self.cluster is None:
            del values["cluster"]
        return {
            **values,
            "steadiness": self.steadiness.as_dict(),
            "divided": [part.as_dict() for part in self.divided],
            "hit_ratio": self.hit_ratio,
            "throughput_per_s": self.throughput_per_s,
            "goodput_per_s": self.goodput_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PointFigures":
        """Read the result of :meth:`as_dict`. Raises KeyError and TypeError for anything else."""
        known = {name: values[name] for name in cls.__slots__ if name != "cluster"}
        cluster = ClusterSummary(**values["cluster"]) if "cluster" in values else None
        parts = tuple(Part(**part) for part in values["parts"])
        divided = tuple(map(PartFigures.from_dict, values["divided"]))
        steadiness = Steadiness.from_dict(values["steadiness"])
        return cls(**known | {"parts": parts, "steadiness": steadiness, "divided": divided, "cluster": cluster})


def figures_of(
    log: RequestLog,
    bounds: Bounds,
    peak_live: Mapping[str, int],
    divided: tuple[PartFigures, ...] = (),
    cluster: ClusterSummary | None = None,
) -> PointFigures:
    """Sum up a finished run, with the given peaks, figures of its parts and its cluster. O(requests log requests)."""
    arrival_s, end_s = log.arrival_s, log.end_s
    is_finished = ~np.isnan(end_s)
    ttft_s, is_good = _first_tokens(log, is_finished, bounds)
    tpot_s, keeps_pace = _further_tokens(log, is_finished, bounds)
    is_good &= keeps_pace
    hit_tokens = log.counts("num_hit_tokens")
    prompt_tokens = np.where(hit_tokens >= 0, log.counts("num_prompt_tokens"), 0)
    hit_tokens = np.maximum(hit_tokens, 0)
    outputs = (log.counts("num_output_tokens").astype(np.int64) * log.counts("num_sequences"))[is_finished]
    start_s = float(arrival_s[0]) if len(arrival_s) else 0.0
    ends_s, order = np.sort(end_s[is_finished]), np.argsort(end_s[is_finished], kind="stable")
    return PointFigures(
        num_requests=log.num_requests,
        num_rejected=log.num_requests - int(is_finished.sum()),
        num_finished=int(is_finished.sum()),
        num_good=int(is_good.sum()),
        has_content=log.num_with_content > 0,
        num_prompt_tokens=int(prompt_tokens.sum()),
        num_hit_tokens=int(hit_tokens.sum()),
        num_output_tokens=int(outputs.sum()),
        span_s=float(ends_s[-1]) - start_s if len(ends_s) else 0.0,
        offered_s=float(arrival_s[-1]) - start_s if len(arrival_s) else 0.0,
        busy_s=log.busy_s,
        num_steps=log.num_steps,
        num_preemptions=log.num_preemptions,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        itl_s={f"p{percent}": log.between_tokens.percentile_s(percent) for percent in PERCENTILES},
        waited_s=dict(log.waited_s),
        peak_live=dict(peak_live),
        steadiness=steadiness_of(log, bounds),
        parts=_parts(prompt_tokens, hit_tokens, ends_s - start_s, is_good[order]),
        divided=divided,
        cluster=cluster,
    )


def _first_tokens(log: RequestLog, is_finished: Flags, bounds: Bounds) -> tuple[dict[str, float | None], Flags]:
    """Sum up the times of first tokens, and which of them were in time: bool ``[finished]``."""
    ttft_s = log.first_token_s[is_finished] - log.arrival_s[is_finished]
    return _summary(ttft_s), ttft_s <= (math.inf if bounds.ttft_s is None else bounds.ttft_s)


def _further_tokens(log: RequestLog, is_finished: Flags, bounds: Bounds) -> tuple[dict[str, float | None], Flags]:
    """Sum up the times per further token, and which answers were within their bound: bool ``[finished]``."""
    tpot_s = log.end_s[is_finished] - log.first_token_s[is_finished]
    num_further = log.counts("num_output_tokens")[is_finished] - 1
    tpot_s /= np.maximum(num_further, 1)
    has_further = num_further > 0
    keeps_pace = ~has_further | (tpot_s <= (math.inf if bounds.tpot_s is None else bounds.tpot_s))
    return _summary(tpot_s[has_further]), keeps_pace


def _parts(prompt_tokens: Int32Array, hit_tokens: Int32Array, ends_s: Float64Array, is_good: Flags) -> tuple[Part, ...]:
    by_arrival = np.linspace(0, len(prompt_tokens), NUM_PARTS + 1).astype(int)
    by_end = np.linspace(0, len(ends_s), NUM_PARTS + 1).astype(int)
    edges_s = [0.0 if not stop else float(ends_s[stop - 1]) for stop in by_end]
    return tuple(
        Part(
            int(prompt_tokens[by_arrival[place] : by_arrival[place + 1]].sum()),
            int(hit_tokens[by_arrival[place] : by_arrival[place + 1]].sum()),
            int(by_end[place + 1] - by_end[place]),
            int(is_good[by_end[place] : by_end[place + 1]].sum()),
            edges_s[place + 1] - edges_s[place],
        )
        for place in range(NUM_PARTS)
    )


def _summary(times_s: Float64Array) -> dict[str, float | None]:
    if not len(times_s):
        return dict.fromkeys(("mean", *(f"p{percent}" for percent in PERCENTILES)))
    values = np.percentile(times_s, PERCENTILES).tolist()
    return {
        "mean": float(times_s.mean()),
        **{f"p{percent}": value for percent, value in zip(PERCENTILES, values, strict=True)},
    }
