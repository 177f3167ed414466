"""The gain of one choice over another: paired, over all other choices that were tried, with its uncertainty.

Two settings that differ in one choice alone serve the same requests, so they are compared part by part of the trace.
The traffic of a setting is that under the highest load that it holds. If no setting holds any, it is the highest number
of answers a second within the bounds, over all loads. Each value of an axis is compared with the first one: by the
geometric mean of the ratios of traffic, and the mean difference of hit ratios, over all pairs. For traffic, pairs in
which neither setting has significant traffic are left out. The interval is that of the jackknife (Quenouille 1956;
Tukey 1958): the movement of the estimate when one eighth of the trace is left out. Neighbouring parts are similar, so
the interval is somewhat too narrow. If loads were searched, the capacity of a setting lies between the highest load
that held and the lowest that did not, and the interval is widened by that.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pagedkv.simulation.planning.figures import NUM_PARTS, PointFigures
from pagedkv.simulation.planning.searching import LoadLimit, limit_of

__all__ = ["Effect", "Estimate", "PointResult", "effects_of", "limits_of", "serves", "settings_of", "traffic_per_s"]

STUDENT: Final = 2.365
"""Student's t with 7 degrees of freedom, two-sided, 95 %."""
LEAST_RATIO: Final = 0.02
LEAST_POINTS: Final = 0.002
"""Smaller differences are insignificant whatever the interval: 2 % of the traffic, 0.2 points of the hit ratio."""
LEAST_SURE: Final = 1e-9
"""Tolerance for rounding: an interval whose end is this close to 1 contains 1."""
LEAST_SHARE: Final = 0.01
"""A setting has significant traffic if it answers at least this share of the requests within the bounds."""
ALL_PARTS: Final = tuple(range(NUM_PARTS))

Choices = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PointResult:
    """One run: its choices by axis, its load, and its figures."""

    choices: Choices
    load: float
    figures: PointFigures


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the ends of its interval, and its values for the halves of the trace."""

    value: float
    low: float
    high: float
    halves: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Effect:
    """The gain of a value of an axis over the first one.

    Args:
        axis, value, reference: the compared values.
        num_pairs: pairs of settings that differ in nothing else.
        num_serving: pairs in which at least one setting has significant traffic; ``traffic`` is over these.
        traffic: ratio of the traffic; None if one of a pair has none within the bounds, or there is no pair.
        hit_ratio: difference of the hit ratios; None if the trace has no content.
        is_capped: whether one of a pair holds every load that was tried, or every load for which the trace is long
            enough.
    """

    axis: str
    value: str
    reference: str
    num_pairs: int
    num_serving: int
    traffic: Estimate | None
    hit_ratio: Estimate | None
    is_capped: bool = False

    @property
    def changes_traffic(self) -> bool:
        """Whether the traffic differs by more than chance and by a significant amount."""
        ratio = self.traffic
        if ratio is None:
            return self.num_serving > 0
        holds_none = ratio.low <= 1 + LEAST_SURE and ratio.high >= 1 - LEAST_SURE
        return not holds_none and abs(math.log(ratio.value)) > math.log1p(LEAST_RATIO)

    @property
    def is_open(self) -> bool:
        """Whether a significant difference of the traffic is neither shown nor excluded."""
        ratio = self.traffic
        least = math.log1p(LEAST_RATIO)
        return (
            ratio is not None
            and not self.changes_traffic
            and (math.log(ratio.high) > least or math.log(ratio.low) < -least)
        )

    @property
    def changes_hits(self) -> bool:
        """Whether the hit ratio differs by more than chance and by a significant amount."""
        difference = self.hit_ratio
        return difference is not None and (
            not difference.low <= 0 <= difference.high and abs(difference.value) > LEAST_POINTS
        )


def limits_of(results: Sequence[PointResult]) -> dict[tuple[str, ...], LoadLimit]:
    """Return the load limit of each setting, by its choices in the order of the axes."""
    return {
        key: limit_of((each.load, each.figures.steadiness.verdict) for each in runs) for key, runs in _runs(results)
    }


def settings_of(results: Sequence[PointResult]) -> dict[tuple[str, ...], PointResult]:
    """Return the run by which each setting is compared, by its choices in the order of the axes.

    That is the run under the highest load that holds. For a setting that holds no load, it is the lowest load if
    another setting holds any, else the load with the most traffic.
    """
    limits = limits_of(results)
    any_holds = any(limit.held is not None for limit in limits.values())
    best = {}
    for key, runs in _runs(results):
        held = limits[key].held
        if held is not None:
            best[key] = next(each for each in runs if each.load == held)
        elif any_holds:
            best[key] = min(runs, key=lambda each: each.load)
        else:
            best[key] = max(runs, key=lambda each: traffic_per_s(each.figures))
    return best


def _runs(results: Sequence[PointResult]) -> Iterable[tuple[tuple[str, ...], list[PointResult]]]:
    runs: dict[tuple[str, ...], list[PointResult]] = {}
    for result in results:
        runs.setdefault(tuple(result.choices.values()), []).append(result)
    return runs.items()


def traffic_per_s(figures: PointFigures, parts: Sequence[int] = ALL_PARTS) -> float:
    """Return the good answers a second, of some parts of the run."""
    span_s = sum(figures.parts[part].span_s for part in parts)
    return sum(figures.parts[part].num_good for part in parts) / span_s if span_s else 0.0


def serves(figures: PointFigures) -> bool:
    """Whether a run has significant traffic within the bounds."""
    return figures.num_good > 0 and figures.num_good >= LEAST_SHARE * figures.num_requests


def effects_of(results: Sequence[PointResult], *, is_searched: bool = False) -> list[Effect]:
    """Compare the values of each axis with its first one, in their order.

    Args:
        results: runs of settings with the same axes.
        is_searched: whether loads were searched instead of given; then the capacity of a setting is an interval.
    """
    best = settings_of(results)
    limits = limits_of(results)
    steps = {key: _step(limit) if is_searched else 0.0 for key, limit in limits.items()}
    axes = list(next(iter(best.values())).choices)
    effects = []
    for place, axis in enumerate(axes):
        reference, *others = dict.fromkeys(key[place] for key in best)
        for value in others:
            keys = [
                (key, other)
                for key in best
                if key[place] == value and (other := (*key[:place], reference, *key[place + 1 :])) in best
            ]
            if keys:
                effect = _effect(
                    axis, value, reference, [(best[key].figures, best[other].figures) for key, other in keys]
                )
                up = max(steps[key] for key, _ in keys)
                down = max(steps[other] for _, other in keys)
                is_capped = any(
                    limits[each].held is not None and not limits[each].is_decided for pair in keys for each in pair
                )
                effects.append(replace(effect, traffic=_widened(effect.traffic, down, up), is_capped=is_capped))
    return effects


def _step(limit: LoadLimit) -> float:
    """Return the logarithm of the ratio between the highest possible capacity and the load that held."""
    return 0.0 if limit.held is None or limit.ended is None else math.log(limit.ended / limit.held)


def _widened(estimate: Estimate | None, down: float, up: float) -> Estimate | None:
    """Widen an interval by the uncertainty of the search; ``down`` and ``up`` are logarithms."""
    if estimate is None:
        return None
    return replace(estimate, low=estimate.low * math.exp(-down), high=estimate.high * math.exp(up))


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
    """Estimate a statistic of parts, with a jackknife interval; ``shown`` converts its values for display."""
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
