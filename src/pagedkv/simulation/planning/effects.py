"""What one choice brings beside another: paired, over everything else that was tried, with its uncertainty.

Two settings that differ in one choice alone serve the same requests, so they are compared part by part of the trace.
The traffic that a setting serves is the most answers a second that keep the bounds, over the loads tried. Of an axis
each value is compared with the first one: the geometric mean of the ratios of traffic, and the mean difference of hit
ratios, over all pairs; for traffic without those pairs of which neither serves anything to speak of. The interval is
that of the jackknife (Quenouille 1956; Tukey 1958): how far the answer moves when one eighth of the trace is left out.
Neighbouring parts resemble one another, so it is somewhat too narrow.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.simulation.planning.figures import NUM_PARTS, PointFigures

__all__ = ["Effect", "Estimate", "PointResult", "effects_of", "serves", "settings_of", "traffic_per_s"]

STUDENT: Final = 2.365
"""Of t with 7 degrees of freedom, both sides, 95 %."""
LEAST_RATIO: Final = 0.02
LEAST_POINTS: Final = 0.002
"""Smaller differences make none, whatever their interval: 2 % of the traffic, 0.2 points of the hit ratio."""
LEAST_SHARE: Final = 0.01
"""Whoever answers a smaller share of the requests within the bounds serves nothing to speak of."""
ALL_PARTS: Final = tuple(range(NUM_PARTS))

Choices = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PointResult:
    """One run: what was chosen, by axis, how many times the recorded traffic came, and what came of it."""

    choices: Choices
    load: float
    figures: PointFigures


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the ends of its interval, and what each half of the trace says."""

    value: float
    low: float
    high: float
    halves: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Effect:
    """What a value of an axis brings beside the first one.

    Args:
        axis, value, reference: which are compared.
        num_pairs: pairs of settings that differ in nothing else.
        num_serving: those of them of which one serves anything to speak of; the traffic is theirs.
        traffic: ratio of the traffic; None where one of a pair serves none within the bounds, or there is no pair.
        hit_ratio: difference of the hit ratios; None where the trace does not tell what hits.
    """

    axis: str
    value: str
    reference: str
    num_pairs: int
    num_serving: int
    traffic: Estimate | None
    hit_ratio: Estimate | None

    @property
    def changes_traffic(self) -> bool:
        """Whether the traffic differs by more than chance and more than nothing."""
        ratio = self.traffic
        if ratio is None:
            return self.num_serving > 0
        return not ratio.low <= 1 <= ratio.high and abs(math.log(ratio.value)) > math.log1p(LEAST_RATIO)

    @property
    def is_open(self) -> bool:
        """Whether a difference of the traffic that would matter can neither be told nor excluded."""
        ratio = self.traffic
        least = math.log1p(LEAST_RATIO)
        return (
            ratio is not None
            and not self.changes_traffic
            and (math.log(ratio.high) > least or math.log(ratio.low) < -least)
        )

    @property
    def changes_hits(self) -> bool:
        """Whether the hit ratio differs by more than chance and more than nothing."""
        difference = self.hit_ratio
        return difference is not None and (
            not difference.low <= 0 <= difference.high and abs(difference.value) > LEAST_POINTS
        )


def settings_of(results: Sequence[PointResult]) -> dict[tuple[str, ...], PointResult]:
    """Give of each setting the load under which it serves the most; by its choices, in the order of the axes."""
    best: dict[tuple[str, ...], PointResult] = {}
    for result in results:
        key = tuple(result.choices.values())
        if key not in best or traffic_per_s(result.figures) > traffic_per_s(best[key].figures):
            best[key] = result
    return best


def traffic_per_s(figures: PointFigures, parts: Sequence[int] = ALL_PARTS) -> float:
    """Give the answers a second that keep the bounds, of some parts of the run."""
    span_s = sum(figures.parts[part].span_s for part in parts)
    return sum(figures.parts[part].num_good for part in parts) / span_s if span_s else 0.0


def serves(figures: PointFigures) -> bool:
    """Whether a run keeps the bounds for anybody to speak of."""
    return figures.num_good > 0 and figures.num_good >= LEAST_SHARE * figures.num_requests


def effects_of(results: Sequence[PointResult]) -> list[Effect]:
    """Compare the values of each axis with its first one, in their order."""
    best = settings_of(results)
    axes = list(next(iter(best.values())).choices)
    effects = []
    for place, axis in enumerate(axes):
        reference, *others = dict.fromkeys(key[place] for key in best)
        for value in others:
            pairs = [
                (result.figures, best[other].figures)
                for key, result in best.items()
                if key[place] == value and (other := (*key[:place], reference, *key[place + 1 :])) in best
            ]
            if pairs:
                effects.append(_effect(axis, value, reference, pairs))
    return effects


def _effect(axis: str, value: str, reference: str, pairs: Sequence[tuple[PointFigures, PointFigures]]) -> Effect:
    serving = [pair for pair in pairs if any(map(serves, pair))]

    def log_ratio(parts: Sequence[int]) -> float | None:
        ratios = [(traffic_per_s(ours, parts), traffic_per_s(theirs, parts)) for ours, theirs in serving]
        if not ratios or not all(ours and theirs for ours, theirs in ratios):
            return None
        return math.fsum(math.log(ours / theirs) for ours, theirs in ratios) / len(ratios)

    def difference(parts: Sequence[int]) -> float | None:
        ratios = [(_hit_ratio(ours, parts), _hit_ratio(theirs, parts)) for ours, theirs in pairs]
        known = [ours - theirs for ours, theirs in ratios if ours is not None and theirs is not None]
        return math.fsum(known) / len(known) if len(known) == len(pairs) else None

    traffic = _estimated(log_ratio, math.exp)
    return Effect(axis, value, reference, len(pairs), len(serving), traffic, _estimated(difference, float))


def _hit_ratio(figures: PointFigures, parts: Sequence[int]) -> float | None:
    num_prompt_tokens = sum(figures.parts[part].num_prompt_tokens for part in parts)
    num_hit_tokens = sum(figures.parts[part].num_hit_tokens for part in parts)
    return num_hit_tokens / num_prompt_tokens if figures.has_content and num_prompt_tokens else None


def _estimated(statistic: Callable[[Sequence[int]], float | None], shown: Callable[[float], float]) -> Estimate | None:
    """Estimate a statistic of parts, with an interval by leaving each of them out; ``shown`` is how it is written."""
    value = statistic(ALL_PARTS)
    without = [statistic([each for each in ALL_PARTS if each != part]) for part in ALL_PARTS]
    half = NUM_PARTS // 2
    halves = [statistic(ALL_PARTS[:half]), statistic(ALL_PARTS[half:])]
    known = [each for each in without if each is not None]
    if value is None or len(known) < NUM_PARTS or halves[0] is None or halves[1] is None:
        return None
    mean = math.fsum(known) / NUM_PARTS
    error = math.sqrt((NUM_PARTS - 1) / NUM_PARTS * math.fsum((each - mean) ** 2 for each in known))
    return Estimate(
        shown(value),
        shown(value - STUDENT * error),
        shown(value + STUDENT * error),
        (shown(halves[0]), shown(halves[1])),
    )
