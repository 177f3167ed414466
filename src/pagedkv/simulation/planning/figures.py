"""The figures of a point: bounds of good answers, whether a load holds, parts by tenant and window.

Goodput counts good answers alone, those within the bounds (DistServe, OSDI 2024, section 2).

A load may be sustained, or may only fill a queue that is drained afterwards. The end of a run shows little: all
requests are answered at some time, and a trace of half a second is drained at full speed. So the first quarter of the
arrivals' time is a warm-up, which is not measured. The requests that arrive in the other three quarters are measured.
These quarters must last long enough, and the queue of requests that wait for their first token must not grow from the
third quarter to the fourth. A load holds if, in addition, nine of ten measured requests are within the bounds.

Tenants and windows have figures of their own. All requests were served together: each part was served among the others,
and parts of one kind add up to the whole run.

Differences between two settings are paired by parts. Hits are divided by eighths of the requests in order of arrival;
answers, and the good ones among them, by eighths of the answers in order of their ends, with the seconds that each
eighth spans.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Float64Array, Int32Array, Int64Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.results import Result
from pagedkv.planner.traces.clocks import WindowRule
from pagedkv.simulation.cluster import ClusterFigures
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import RequestLog

LONGEST_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Bounds(Result):
    """The definition of a good answer.

    Args:
        ttft_s: most seconds from arrival to the first token; None: no bound.
        tpot_s: most seconds a token after the first one, as the mean of an answer; None: no bound.

    Raises:
        ConfigurationError: a bound is not positive, or longer than a day.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        """Check that each bound is possible by itself."""
        for name, seconds in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if seconds is not None and not 0 < seconds <= LONGEST_S:
                raise ConfigurationError(f"`{name}` must be over 0 and at most {LONGEST_S:,.0f} seconds, got {seconds}")

    def require_possible(self, name: str, costs: CostModel) -> None:
        """Refuse bounds that even a single request on an idle machine would exceed.

        Raises:
            ConfigurationError: a bound is too tight; the message has the seconds that the request takes.
        """
        least_s = costs.step_s(1, 1, 1, 1)
        for bound, seconds, what in (
            ("ttft_s", self.ttft_s, "the first token"),
            ("tpot_s", self.tpot_s, "each further token"),
        ):
            if seconds is not None and seconds < least_s:
                raise ConfigurationError(
                    f"`{bound}={seconds:g}` cannot be met: by the cost model {name} {what} takes at least "
                    f"{least_s:.4g} seconds, on an idle machine. Give a longer bound, or faster hardware"
                )

    @property
    def are_given(self) -> bool:
        """Whether there is any bound."""
        return self.ttft_s is not None or self.tpot_s is not None


HOLDS: Final = "holds"
FAILS: Final = "fails"
TOO_SHORT: Final = "too short"
WARM_UP: Final = 0.25
"""Share of the time in which requests arrive."""
LEAST_MEASURED_S: Final = 30.0
LEAST_ANSWERS: Final = 3.0
"""The measured time is at least this number of median answers, from the first token to the last."""
LEAST_REQUESTS: Final = 50
GOOD_SHARE: Final = 0.9
"""Share of the measured requests that must be within the bounds."""
MOST_GROWTH: Final = 1.25
LEAST_GROWTH: Final = 1.0
LEAST_GROWTH_SHARE: Final = 0.01
"""A queue grows if it is this many times as long a quarter later, and longer by more than a request, and by more than
this share of that quarter's arrivals: a hundredth of the traffic is not served."""


@dataclass(frozen=True, slots=True)
class Steadiness(Result):
    """Whether a load holds, and the causes if it does not.

    Args:
        verdict: "holds", "fails" or, if the trace does not suffice, "too short".
        binds: the causes of a failure: "queue", "ttft", "tpot", "rejected"; empty if the load holds or the trace is
            too short.
        warm_up_s, measured_s, least_s: seconds of arrivals that are not measured, that are measured, and that are
            required.
        num_measured: requests that arrive after the warm-up.
        num_good: measured requests within the bounds; without bounds, all finished ones.
        num_good_prompt_tokens, num_good_output_tokens: tokens of good ones.
        num_late, num_slow, num_rejected: requests that begin too late, decode too slowly, are not served.
        ttft_s, tpot_s: the times within which nine of ten measured requests are; None if fewer have one.
        num_waiting: mean number of requests that wait for a first token, in the third and in the fourth quarter.
    """

    verdict: str
    binds: tuple[str, ...]
    warm_up_s: float
    measured_s: float
    least_s: float
    num_measured: int
    num_good: int
    num_good_prompt_tokens: int
    num_good_output_tokens: int
    num_late: int
    num_slow: int
    num_rejected: int
    ttft_s: float | None
    tpot_s: float | None
    num_waiting: tuple[float, float]

    @property
    def good_per_s(self) -> float:
        """Good measured requests a second, by their arrivals: the sustained traffic, if the load holds."""
        return self.num_good / self.measured_s if self.measured_s else 0.0


class ServedTimes(Protocol):
    """Requests that were served, in order of arrival: by a simulation, or measured on an engine.

    Attributes:
        arrival_s, first_token_s, end_s: float64 ``[requests]``; NaN for what did not happen.
    """

    @property
    def arrival_s(self) -> Float64Array:
        """Times of arrival."""
        ...

    @property
    def first_token_s(self) -> Float64Array:
        """Times of first tokens."""
        ...

    @property
    def end_s(self) -> Float64Array:
        """Times of last tokens."""
        ...

    def counts(self, name: str) -> Int32Array:
        """Return ``num_prompt_tokens``, ``num_output_tokens`` or ``num_sequences``: int32 ``[requests]``."""
        ...


def steadiness_of(log: ServedTimes, bounds: Bounds) -> Steadiness:
    """Compute the steadiness of a finished run. O(requests log requests)."""
    arrival_s = log.arrival_s
    start_s, end_s = (float(arrival_s[0]), float(arrival_s[-1])) if len(arrival_s) else (0.0, 0.0)
    offered_s = end_s - start_s
    begin_s = start_s + WARM_UP * offered_s
    is_measured = arrival_s >= begin_s
    num_measured = int(is_measured.sum()) if offered_s else 0
    ttft_s, tpot_s = _times(log)
    ttft_s, tpot_s = ttft_s[is_measured], tpot_s[is_measured]
    is_rejected = np.isnan(ttft_s)
    is_late = np.zeros_like(is_rejected) if bounds.ttft_s is None else ttft_s > bounds.ttft_s
    is_slow = np.zeros_like(is_rejected) if bounds.tpot_s is None else tpot_s > bounds.tpot_s
    num_late, num_slow, num_rejected = (int(each.sum()) for each in (is_late, is_slow, is_rejected))
    is_good = ~(is_late | is_slow | is_rejected)
    num_good = int(is_good.sum())
    prompts, outputs, sequences = (
        log.counts(name)[is_measured][is_good].astype(np.int64)
        for name in ("num_prompt_tokens", "num_output_tokens", "num_sequences")
    )
    waiting = _mean_waiting(log, (start_s + offered_s / 2, start_s + 0.75 * offered_s, end_s))
    least_s = max(LEAST_MEASURED_S, LEAST_ANSWERS * _middle(log.end_s[is_measured] - log.first_token_s[is_measured]))
    measured_s = (1 - WARM_UP) * offered_s
    is_long = measured_s >= least_s and num_measured >= LEAST_REQUESTS
    num_last = int((arrival_s >= start_s + 0.75 * offered_s).sum())
    bad = {"rejected": num_rejected, "ttft": num_late, "tpot": num_slow}
    binds = (
        *(("queue",) if _grows(*waiting, num_last) else ()),
        *(_bad(bad, num_measured - num_good, num_measured)),
    )
    return Steadiness(
        verdict=TOO_SHORT if not is_long else FAILS if binds else HOLDS,
        binds=binds if is_long else (),
        warm_up_s=WARM_UP * offered_s,
        measured_s=measured_s,
        least_s=least_s,
        num_measured=num_measured,
        num_good=num_good,
        num_good_prompt_tokens=int(prompts.sum()),
        num_good_output_tokens=int((outputs * sequences).sum()),
        num_late=num_late,
        num_slow=num_slow,
        num_rejected=num_rejected,
        ttft_s=_kept(ttft_s),
        tpot_s=_kept(np.where(np.isnan(tpot_s) & ~is_rejected, 0.0, tpot_s)),
        num_waiting=waiting,
    )


def _times(log: ServedTimes) -> tuple[Float64Array, Float64Array]:
    """Return the seconds to the first token and those per further token; NaN if there is none."""
    num_further = log.counts("num_output_tokens") - 1
    further_s = (log.end_s - log.first_token_s) / np.maximum(num_further, 1)
    return log.first_token_s - log.arrival_s, np.where(num_further > 0, further_s, np.nan)


def _mean_waiting(log: ServedTimes, edges_s: tuple[float, float, float]) -> tuple[float, float]:
    """Return the mean number of requests that wait for a first token, in two spans of time, without rejected ones."""
    begun_s = np.where(np.isnan(log.first_token_s), log.arrival_s, log.first_token_s)
    means = []
    for from_s, to_s in pairwise(edges_s):
        within_s = np.clip(begun_s, from_s, to_s) - np.clip(log.arrival_s, from_s, to_s)
        means.append(float(within_s.sum()) / (to_s - from_s) if to_s > from_s else 0.0)
    return means[0], means[1]


def _grows(third: float, fourth: float, num_arrived: int) -> bool:
    most = max(LEAST_GROWTH, LEAST_GROWTH_SHARE * num_arrived)
    return fourth > MOST_GROWTH * third and fourth - third > most


def _bad(counts: dict[str, int], num_bad: int, num_measured: int) -> tuple[str, ...]:
    """Return the causes that make more than one in ten bad: each cause that suffices alone, else the largest."""
    allowed = (1 - GOOD_SHARE) * num_measured
    if num_bad <= allowed:
        return ()
    alone = tuple(name for name, number in counts.items() if number > allowed)
    return alone or (max(counts, key=lambda name: counts[name]),)


def _middle(seconds: Float64Array) -> float:
    known = seconds[~np.isnan(seconds)]
    return float(np.median(known)) if len(known) else 0.0


def _kept(seconds: npt.NDArray[np.float64]) -> float | None:
    """Return the least bound that nine of ten are within; NaN is within no bound."""
    if not len(seconds):
        return None
    place = int(np.ceil(round(GOOD_SHARE * len(seconds), 9))) - 1
    value = float(np.sort(seconds)[max(0, place)])
    return None if np.isnan(value) else value


TENANT: Final = "tenant"
WINDOW: Final = "window"
PART_PERCENTILES: Final = (50, 99)
NO_ORIGIN: Final[Callable[[], float]] = float


@dataclass(frozen=True, slots=True)
class Division:
    """How the requests of a run are divided, in addition to tenants.

    Args:
        windows: windows of recorded time, or None.
        origin_s: returns the seconds by which arrivals were shifted, after the trace has been read.
    """

    windows: WindowRule | None = None
    origin_s: Callable[[], float] = NO_ORIGIN


@dataclass(frozen=True, slots=True)
class PartFigures(Result):
    """The figures of one part.

    Args:
        kind: "tenant" or "window".
        name: name of the tenant or window.
        num_requests, num_rejected, num_finished, num_good: requests; good ones are within the bounds.
        num_offered_tokens: tokens of requested prompts and answers.
        num_prompt_tokens, num_hit_tokens: tokens at the first admissions.
        num_output_tokens: tokens of finished requests, all sequences.
        has_content: whether the trace has content.
        span_s: seconds of a window between the first and the last arrival of the trace; None for a tenant.
        is_whole: whether the whole window lies between these arrivals.
        ttft_s, tpot_s: p50 and p99, or None where there are none.
    """

    DERIVED: ClassVar = ("hit_ratio", "offered_tokens_per_s")

    kind: str
    name: str
    num_requests: int
    num_rejected: int
    num_finished: int
    num_good: int
    num_offered_tokens: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_output_tokens: int
    has_content: bool
    span_s: float | None
    is_whole: bool
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that hit; None if the trace has no content."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.has_content and self.num_prompt_tokens else None

    @property
    def offered_tokens_per_s(self) -> float:
        """Requested tokens of a window, per second of recorded time; 0 for a tenant."""
        return self.num_offered_tokens / self.span_s if self.span_s else 0.0


def parts_of(log: RequestLog, bounds: Bounds, division: Division, load: float = 1.0) -> tuple[PartFigures, ...]:
    """Sum up a run by tenant, if requests have tenants, and by window, if requested. O(requests log requests).

    Args:
        log: log of a finished run.
        bounds: bounds of good answers.
        division: how requests are divided.
        load: factor by which they arrived faster than recorded.

    Raises:
        ConfigurationError: the trace has no such windows.
    """
    parts: list[PartFigures] = []
    if log.tenants.are_known:
        names = log.tenants.names
        spans: Sequence[tuple[float | None, bool]] = [(None, True)] * len(names)
        parts += _divided(log, bounds, TENANT, names, log.counts("tenant_numbers"), spans)
    if division.windows is not None:
        windows, numbers = division.windows.divide(log.arrival_s * load, division.origin_s())
        names, spans = [each.name for each in windows], [(each.duration_s, each.is_whole) for each in windows]
        parts += _divided(log, bounds, WINDOW, names, numbers, spans)
    return tuple(parts)


def busiest_and_quietest(parts: Sequence[PartFigures]) -> tuple[PartFigures, PartFigures] | None:
    """Return the windows with the most and the fewest requested tokens a second; None unless there are several.

    Windows that the trace cuts off count only if fewer than two are whole.
    """
    windows = [part for part in parts if part.kind == WINDOW and part.span_s]
    whole = [part for part in windows if part.is_whole]
    known = whole if len(whole) > 1 else windows
    if len(known) < 2:  # noqa: PLR2004 - two to compare
        return None
    return max(known, key=lambda part: part.offered_tokens_per_s), min(
        known, key=lambda part: part.offered_tokens_per_s
    )


def _divided(  # noqa: PLR0913, PLR0917 - one division of a run
    log: RequestLog,
    bounds: Bounds,
    kind: str,
    names: Sequence[str],
    numbers: Int32Array,
    spans: Sequence[tuple[float | None, bool]],
) -> Iterator[PartFigures]:
    order = np.argsort(numbers, kind="stable")
    edges = np.searchsorted(numbers[order], np.arange(len(names) + 1))
    for place, (name, (span_s, is_whole)) in enumerate(zip(names, spans, strict=True)):
        chosen = order[edges[place] : edges[place + 1]]
        yield replace(_figures(log, bounds, chosen), kind=kind, name=name, span_s=span_s, is_whole=is_whole)


def _figures(log: RequestLog, bounds: Bounds, chosen: Int64Array) -> PartFigures:
    """Sum up the chosen requests."""
    prompts, outputs, hits, sequences = (
        log.counts(each)[chosen].astype(np.int64)
        for each in ("num_prompt_tokens", "num_output_tokens", "num_hit_tokens", "num_sequences")
    )
    ttft_s = log.first_token_s[chosen] - log.arrival_s[chosen]
    further_s = (log.end_s[chosen] - log.first_token_s[chosen]) / np.maximum(outputs - 1, 1)
    tpot_s = np.where(outputs > 1, further_s, 0.0)
    is_finished = ~np.isnan(log.end_s[chosen])
    is_good = is_finished & (ttft_s <= _most(bounds.ttft_s)) & (tpot_s <= _most(bounds.tpot_s))
    return PartFigures(
        kind="",
        name="",
        num_requests=len(chosen),
        num_rejected=len(chosen) - int(is_finished.sum()),
        num_finished=int(is_finished.sum()),
        num_good=int(is_good.sum()),
        num_offered_tokens=int((prompts + outputs * sequences).sum()),
        num_prompt_tokens=int(prompts[hits >= 0].sum()),
        num_hit_tokens=int(np.maximum(hits, 0).sum()),
        num_output_tokens=int((outputs * sequences)[is_finished].sum()),
        has_content=log.num_with_content > 0,
        span_s=None,
        is_whole=True,
        ttft_s=_percentiles(ttft_s[is_finished]),
        tpot_s=_percentiles(further_s[is_finished & (outputs > 1)]),
    )


def _most(bound_s: float | None) -> float:
    return math.inf if bound_s is None else bound_s


def _percentiles(times_s: Float64Array) -> dict[str, float | None]:
    names = [f"p{percent}" for percent in PART_PERCENTILES]
    if not len(times_s):
        return dict.fromkeys(names)
    return dict(zip(names, np.percentile(times_s, PART_PERCENTILES).tolist(), strict=True))


Flags: TypeAlias = npt.NDArray[np.bool_]
NUM_PARTS: Final = 8
POINT_PERCENTILES: Final = (50, 90, 99)


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
class PointFigures(Result):
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

    DERIVED: ClassVar = ("hit_ratio", "throughput_per_s", "goodput_per_s", "output_tokens_per_s")

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
        """Return the figures for JSON."""
        values = Result.as_dict(self)
        if self.cluster is None:
            del values["cluster"]
        return values


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
        itl_s={f"p{percent}": log.between_tokens.percentile_s(percent) for percent in POINT_PERCENTILES},
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
        return dict.fromkeys(("mean", *(f"p{percent}" for percent in POINT_PERCENTILES)))
    values = np.percentile(times_s, POINT_PERCENTILES).tolist()
    return {
        "mean": float(times_s.mean()),
        **{f"p{percent}": value for percent, value in zip(POINT_PERCENTILES, values, strict=True)},
    }
