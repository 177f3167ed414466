"""The setting to take, and why: plain words with figures, of one screen.

Of each axis the value that serves the most, then the one that hits the most; where no value makes a difference the
first one stays, for what was typed first is what people have. Money is not known here: of hardware and memory every
value is told, and what each GPU serves.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.simulation.planning.effects import Effect, PointResult, effects_of, serves, settings_of, traffic_per_s

__all__ = ["GPU_AXIS", "Decision", "decide"]

GPU_AXIS: Final = "gpu"
KEEPS_UP: Final = 1.05
"""Answers that end so many times the seconds of the arrivals after the first one have kept up."""
GOOD_ENOUGH: Final = 0.9
WHOLE_FROM: Final = 10
"""Ratios from here on have no decimals, and never an exponent."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do.

    Args:
        headline: the decision, in a sentence.
        reasons: what each choice brings, a sentence each, and what else must be known.
        chosen: the setting.
        best: the run of that setting, under the load at which it serves the most.
        effects: what the reasons are made of.
    """

    headline: str
    reasons: tuple[str, ...]
    chosen: dict[str, str]
    best: PointResult
    effects: tuple[Effect, ...]


def decide(results: Sequence[PointResult], *, has_bounds: bool) -> Decision:
    """Choose among settings that were run.

    Args:
        results: one or more runs, of settings that have the same axes.
        has_bounds: whether good answers are those within bounds, and not all of them.
    """
    best = settings_of(results)
    effects = effects_of(results)
    first = next(iter(best.values()))
    chosen = {axis: _chosen(axis, value, effects, best.values()) for axis, value in first.choices.items()}
    taken = best[tuple(chosen.values())]
    answers = "answers a second within the bounds" if has_bounds else "answers a second"
    reasons = [
        *map(_sentence, effects),
        *_per_gpu(best.values()),
        *(_good_shares(results) if has_bounds else ()),
        *_keeping_up(results, has_bounds=has_bounds),
    ]
    return Decision(_headline(taken, first, answers), tuple(reasons), dict(taken.choices), taken, tuple(effects))


def _chosen(axis: str, first: str, effects: Sequence[Effect], settings: Collection[PointResult]) -> str:
    """Choose a value of an axis: the most traffic, then the most hits; differences that are none do not count."""
    merits = {first: (0.0, 0.0)}
    for effect in effects:
        if effect.axis == axis:
            if not effect.changes_traffic:
                gain = 0.0
            elif effect.traffic is None:
                gain = _mean_traffic(axis, effect.value, settings) - _mean_traffic(axis, first, settings)
            else:
                gain = effect.traffic.value - 1
            hits = effect.hit_ratio.value if effect.hit_ratio is not None and effect.changes_hits else 0.0
            merits[effect.value] = (gain, hits)
    return max(merits, key=lambda value: merits[value])


def _mean_traffic(axis: str, value: str, settings: Collection[PointResult]) -> float:
    traffic = [traffic_per_s(each.figures) for each in settings if each.choices[axis] == value]
    return sum(traffic) / len(traffic)


def _headline(taken: PointResult, first: PointResult, answers: str) -> str:
    traffic, first_traffic = traffic_per_s(taken.figures), traffic_per_s(first.figures)
    at_load = "" if taken.load == 1 else f" at {taken.load:g} times the recorded traffic"
    told = f"{_named(taken)}: {traffic:.3g} {answers}{at_load}"
    if not traffic:
        return f"None of the settings gives {answers}: the bounds, the load or the memory must change"
    if dict(taken.choices) == dict(first.choices):
        return f"Stay with {told}; nothing else that was tried serves more beyond doubt"
    if not serves(first.figures):
        return f"Take {told}, where {_named(first)} serves next to none"
    return f"Take {told}, {_times(traffic / first_traffic)} what {_named(first)} serves"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= WHOLE_FROM else f"{ratio:.2g}x"


def _named(result: PointResult) -> str:
    return ", ".join(result.choices.values())


def _sentence(effect: Effect) -> str:
    """Say what a choice brings: of traffic, of hits, or nothing."""
    return f"{effect.value} instead of {effect.reference}: {', '.join(_differences(effect)) or 'makes no difference'}"


def _differences(effect: Effect) -> Iterator[str]:
    ratio, points = effect.traffic, effect.hit_ratio
    if not effect.num_serving:
        yield "neither serves anything to speak of within the bounds"
    elif ratio is None:
        yield "one of them serves next to nothing within the bounds, so no ratio tells"
    elif effect.changes_traffic:
        yield f"{ratio.value:.2f}x the traffic ({ratio.low:.2f} to {ratio.high:.2f})"
    elif effect.is_open:
        yield f"{ratio.value:.2f}x the traffic, which may be chance ({ratio.low:.2f} to {ratio.high:.2f})"
    if points is not None and effect.changes_hits:
        interval = f"{100 * points.low:+.1f} to {100 * points.high:+.1f}"
        yield f"{100 * points.value:+.1f} points of the hit ratio ({interval})"


def _per_gpu(settings: Collection[PointResult]) -> list[str]:
    """Say on how many GPUs each of them serves the most, where numbers of one kind were tried."""
    by_gpus: dict[str, float] = {}
    for result in settings:
        gpus = result.choices.get(GPU_AXIS)
        if gpus is not None:
            number, cross, _ = gpus.partition("x")
            each = traffic_per_s(result.figures) / (int(number) if cross and number.isdecimal() else 1)
            by_gpus[gpus] = max(by_gpus.get(gpus, 0.0), each)
    if len(by_gpus) <= 1:
        return []
    told = ", ".join(f"{gpus} {each:.2g}" for gpus, each in by_gpus.items())
    return [f"answers a second for each GPU, at best: {told}"]


def _good_shares(results: Sequence[PointResult]) -> list[str]:
    """Say which share of the answers is good under the lowest load, for each value of the first axis, at best."""
    lowest = min(result.load for result in results)
    axis = next(iter(results[0].choices))
    shares: dict[str, float] = {}
    for result in results:
        if result.load == lowest and result.figures.num_requests:
            value = result.choices[axis]
            shares[value] = max(shares.get(value, 0.0), result.figures.num_good / result.figures.num_requests)
    told = ", ".join(f"{share:.1%} with {value}" for value, share in shares.items())
    return [f"within the bounds at {lowest:g} times the recorded traffic: {told}"]


def _keeping_up(results: Sequence[PointResult], *, has_bounds: bool) -> list[str]:
    """Say whether the limits were found at all."""
    highest = max(result.load for result in results)
    last = [result.figures for result in results if result.load == highest]
    if has_bounds:
        keeps_up = [each.num_good >= GOOD_ENOUGH * each.num_requests for each in last]
    else:
        keeps_up = [each.span_s <= KEEPS_UP * each.offered_s for each in last]
    if all(keeps_up):
        limits = "so nothing was found out about their limits: give more (--load)"
        return [f"every setting keeps up with {highest:g} times the recorded traffic, {limits}"]
    if not any(keeps_up):
        return [f"no setting keeps up with {highest:g} times the recorded traffic: figures there are of full load"]
    return []
