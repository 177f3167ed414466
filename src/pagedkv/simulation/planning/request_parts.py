"""Figures of the requests of each tenant, and of those that arrived in each window of recorded time.

All requests were served together: each part was served among the others, and parts of one kind add up to the whole run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from pagedkv.contract.arrays import Float64Array, Int32Array, Int64Array
from pagedkv.planner.traces.windows import WindowRule
from pagedkv.simulation.planning.bounds import Bounds
from pagedkv.simulation.request_log import RequestLog

__all__ = ["TENANT", "WINDOW", "Division", "PartFigures", "busiest_and_quietest", "parts_of"]

TENANT: Final = "tenant"
WINDOW: Final = "window"
PERCENTILES: Final = (50, 99)
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
class PartFigures:
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
    def offered_per_s(self) -> float:
        """Requested tokens of a window, per second of recorded time; 0 for a tenant."""
        return self.num_offered_tokens / self.span_s if self.span_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; :meth:`from_dict` reads them back."""
        return {**asdict(self), "hit_ratio": self.hit_ratio, "offered_tokens_per_s": self.offered_per_s}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PartFigures":
        """Read the result of :meth:`as_dict`. Raises KeyError and TypeError for anything else."""
        return cls(**{name: values[name] for name in cls.__slots__})


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
    return max(known, key=lambda part: part.offered_per_s), min(known, key=lambda part: part.offered_per_s)


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
    names = [f"p{percent}" for percent in PERCENTILES]
    if not len(times_s):
        return dict.fromkeys(names)
    return dict(zip(names, np.percentile(times_s, PERCENTILES).tolist(), strict=True))
