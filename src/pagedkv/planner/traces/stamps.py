"""Arrival times for a file without times or with coarse ones: generated, or spread over the span of a stamp."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request

__all__ = ["GeneratedArrivals", "parse_arrivals", "spread_stamps"]

POISSON: Final = "poisson"
PLACES: Final = 6
MOST_WAITING: Final = 2**16
"""Requests of one stamp that wait in memory; more of them are spread in batches of this size."""


@dataclass(frozen=True, slots=True)
class GeneratedArrivals:
    """Generates random independent arrivals: a Poisson process with a fixed seed.

    Args:
        per_s: mean number of requests a second, positive and finite.

    Raises:
        ConfigurationError: the rate is not positive, or not finite.
    """

    per_s: float

    def __post_init__(self) -> None:
        if not (self.per_s > 0 and math.isfinite(self.per_s)):
            raise ConfigurationError(f"`arrivals=poisson:RATE` must be requests a second, above 0, got {self.per_s}")

    @property
    def description(self) -> str:
        """How these times were generated, as text for users."""
        return f"generated arrivals: at random, {self.per_s:g} a second"

    @property
    def note(self) -> str:
        """A note about generated times, in one sentence."""
        rate = f"at random, {self.per_s:g} a second"
        return f"arrivals are generated, {rate}: every figure of recorded traffic rests on them"

    def applied_to(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests with these arrivals, in their order; the first arrives at 0."""
        random = np.random.default_rng(0)
        arrival_s = 0.0
        for request in requests:
            yield replace(request, arrival_s=round(arrival_s, PLACES))
            arrival_s += random.exponential(1 / self.per_s)


def parse_arrivals(text: str) -> GeneratedArrivals:
    """Parse arrivals in the user's notation. Raises ConfigurationError.

    >>> parse_arrivals("poisson:2.5")
    GeneratedArrivals(per_s=2.5)
    """
    kind, _, rate = text.partition(":")
    try:
        per_s = float(rate)
    except ValueError:
        per_s = math.nan
    if kind != POISSON or math.isnan(per_s):
        raise ConfigurationError(
            f"`arrivals` must be poisson:RATE, as in poisson:2.5 for 2.5 a second; got {text!r:.60}"
        )
    return GeneratedArrivals(per_s)


def spread_stamps(requests: Iterable[Request], span_s: float) -> Iterator[Request]:
    """Spread requests with equal arrivals evenly over the span of their stamp.

    Args:
        requests: in order of arrival.
        span_s: seconds that a stamp covers; less where the next stamp is sooner.

    Returns:
        the requests in their order, the first of each stamp unmoved. Memory holds the requests of one stamp.

    Raises:
        ConfigurationError: the span is not positive, or not finite.
    """
    if not (span_s > 0 and math.isfinite(span_s)):
        raise ConfigurationError(f"`span_s` must be a number of seconds above 0, got {span_s}")
    return _spread(requests, span_s)


def _spread(requests: Iterable[Request], span_s: float) -> Iterator[Request]:
    group: list[Request] = []
    for request in requests:
        if group and (request.arrival_s != group[0].arrival_s or len(group) == MOST_WAITING):
            yield from _apart(group, min(span_s, request.arrival_s - group[0].arrival_s))
            group = []
        group.append(request)
    yield from _apart(group, span_s)


def _apart(group: list[Request], span_s: float) -> Iterator[Request]:
    for place, request in enumerate(group):
        yield request if not place else replace(request, arrival_s=request.arrival_s + span_s * place / len(group))
