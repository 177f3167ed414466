"""The recommended setting and its reasons: plain words with figures, on one screen.

For each axis, the value with the most traffic is chosen, then the one with the most hits. Without a difference the
first value is kept, since users type their present setting first. The capacity of a setting is its highest load that
holds; if the trace is too short to find it, the text states this. Prices are not known here, so the text has the
figures of every value of hardware and memory, and the traffic of each GPU.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.simulation.planning.bounds import Bounds
from pagedkv.simulation.planning.effects import (
    Effect,
    PointResult,
    effects_of,
    limits_of,
    serves,
    settings_of,
    traffic_per_s,
)
from pagedkv.simulation.planning.load_reasons import seconds_text
from pagedkv.simulation.planning.searching import LoadLimit
from pagedkv.simulation.planning.steadiness import HOLDS, TOO_SHORT

__all__ = ["GPU_AXIS", "REPLICAS_AXIS", "Decision", "decide", "num_gpus", "num_replicas"]

GPU_AXIS: Final = "gpu"
REPLICAS_AXIS: Final = "replicas"
TRAFFIC: Final = "the traffic"
SPEED: Final = "the speed at which these requests are answered"
WHOLE_FROM: Final = 10
"""Ratios from this value on are written without decimals, never with an exponent."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The recommendation.

    Args:
        headline: the decision, in a sentence.
        reasons: the gain of each choice, one sentence each, and further notes.
        chosen: the setting.
        best: the run of that setting under the highest load that it holds, or else under the load with the most
            traffic.
        effects: the data behind the reasons.
    """

    headline: str
    reasons: tuple[str, ...]
    chosen: dict[str, str]
    best: PointResult
    effects: tuple[Effect, ...]


def decide(results: Sequence[PointResult], bounds: Bounds, *, is_searched: bool = False) -> Decision:
    """Choose among settings that were run.

    Args:
        results: one or more runs, of settings with the same axes.
        bounds: bounds of good answers; without any, all answers are good.
        is_searched: whether loads were searched instead of given.
    """
    best, limits = settings_of(results), limits_of(results)
    effects = effects_of(results, is_searched=is_searched)
    key = next(iter(best))
    first = best[key]
    chosen = {axis: _chosen(axis, value, effects, best.values()) for axis, value in first.choices.items()}
    taken = best[tuple(chosen.values())]
    what = SPEED if taken.figures.steadiness.verdict == TOO_SHORT else TRAFFIC
    answers = "answers a second within the bounds" if bounds.are_given else "answers a second"
    reasons = [
        *_limits(taken, best, limits, results),
        *(_sentence(effect, what) for effect in effects),
        *_per_gpu(best, limits),
        *(_good_shares(results) if bounds.are_given else ()),
    ]
    headline = _headline(taken, first, answers, limits[tuple(chosen.values())])
    return Decision(headline, tuple(reasons), dict(taken.choices), taken, tuple(effects))


def _chosen(axis: str, first: str, effects: Sequence[Effect], settings: Collection[PointResult]) -> str:
    """Choose a value of an axis: by the most traffic, then the most hits; insignificant differences do not count."""
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


def _headline(taken: PointResult, first: PointResult, answers: str, limit: LoadLimit) -> str:
    figures, verdict = taken.figures, taken.figures.steadiness.verdict
    stays = dict(taken.choices) == dict(first.choices)
    verb = "Stay with" if stays else "Take"
    if verdict == TOO_SHORT:
        faster = "" if stays or not figures.span_s else f", {_times(first.figures.span_s / figures.span_s)} as fast as "
        beside = f"{faster}{_named(first)}" if faster else ""
        return (
            f"{verb} {_named(taken)}: {figures.num_finished:,} requests that arrive within "
            f"{seconds_text(figures.offered_s)} are answered in {seconds_text(figures.span_s)}{beside}; the trace is "
            "too short to determine the sustained traffic"
        )
    traffic, first_traffic = _rate(taken), _rate(first)
    if not traffic:
        return f"None of the settings gives {answers}: the bounds, the load or the memory must change"
    at_load = "the recorded traffic" if taken.load == 1 else f"{taken.load:g} times the recorded traffic"
    if verdict == HOLDS:
        text = f"{_named(taken)}: sustains {traffic:.3g} {answers}, {at_load}{_ended(limit)}"
    else:
        text = f"{_named(taken)}: {traffic:.3g} {answers} at {at_load}, which it does not hold"
    if stays:
        return f"{verb} {text}; no other setting that was tried serves significantly more"
    if not serves(first.figures):
        return f"{verb} {text}, where {_named(first)} serves almost none"
    return f"{verb} {text}, {_times(traffic / first_traffic)} what {_named(first)} serves"


def _rate(result: PointResult) -> float:
    """Return the answers a second of a setting: by arrivals if its load holds, else over the whole run."""
    steady = result.figures.steadiness
    return steady.good_per_s if steady.verdict == HOLDS else traffic_per_s(result.figures)


def _ended(limit: LoadLimit) -> str:
    if limit.ended is None:
        return " (the highest that was tried)"
    return f" ({limit.ended:g} times {'does not hold' if limit.is_decided else 'is undecided: the trace is too short'})"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= WHOLE_FROM else f"{ratio:.2g}x"


def _named(result: PointResult) -> str:
    return ", ".join(result.choices.values())


def _sentence(effect: Effect, what: str) -> str:
    """Describe the gain of a choice: in traffic, in hits, or none."""
    text = ", ".join(_differences(effect, what)) or "makes no difference"
    return f"{effect.value} instead of {effect.reference}: {text}"


def _differences(effect: Effect, what: str) -> Iterator[str]:
    ratio, points = effect.traffic, effect.hit_ratio
    if not effect.num_serving:
        yield "both serve almost nothing within the bounds"
    elif ratio is None:
        yield "one of them serves almost nothing within the bounds, so their ratio is meaningless"
    elif effect.changes_traffic:
        yield f"{ratio.value:.2f}x {what} ({ratio.low:.2f} to {ratio.high:.2f})"
    elif effect.is_open:
        yield f"{ratio.value:.2f}x {what}, which may be chance ({ratio.low:.2f} to {ratio.high:.2f})"
    if effect.is_capped:
        yield "up to the highest load tried, or that the trace suffices for: one of them may hold more"
    if points is not None and effect.changes_hits:
        interval = f"{100 * points.low:+.1f} to {100 * points.high:+.1f}"
        yield f"{100 * points.value:+.1f} points of the hit ratio ({interval})"


def _per_gpu(settings: Mapping[tuple[str, ...], PointResult], limits: Mapping[tuple[str, ...], LoadLimit]) -> list[str]:
    """Describe the capacity of each GPU, by the number and kind of GPUs, if several were tried."""
    by_gpus: dict[str, float] = {}
    for key, result in settings.items():
        gpus = result.choices.get(GPU_AXIS)
        if gpus is not None and limits[key].held is not None:
            by_gpus[gpus] = max(by_gpus.get(gpus, 0.0), _rate(result) / num_gpus(gpus) / num_replicas(result.choices))
    if len(by_gpus) <= 1:
        return []
    rates = ", ".join(f"{gpus} {each:.2g}" for gpus, each in by_gpus.items())
    return [f"answers a second for each GPU, sustained, at best: {rates}"]


def num_gpus(gpus: str) -> int:
    """Count the GPUs in a value of the GPU axis.

    >>> num_gpus("8xh100"), num_gpus("l4")
    (8, 1)
    """
    number, cross, _ = gpus.partition("x")
    return int(number) if cross and number.isdecimal() else 1


def num_replicas(choices: Mapping[str, str]) -> int:
    """Count the replicas of a setting; each has the GPUs that the choices name.

    >>> num_replicas({"replicas": "4 replicas"}), num_replicas({"gpu": "h100"})
    (4, 1)
    """
    return int(choices.get(REPLICAS_AXIS, "1").partition(" ")[0])


def _shown_axis(choices: Mapping[str, str]) -> str:
    """Return the axis for each value of which capacities are described: replicas, or else the first one."""
    return REPLICAS_AXIS if REPLICAS_AXIS in choices else next(iter(choices))


def _good_shares(results: Sequence[PointResult]) -> list[str]:
    """Describe the best share of good answers under the lowest load, for each value of the axis that is shown."""
    lowest = min(result.load for result in results)
    axis = _shown_axis(results[0].choices)
    shares: dict[str, float] = {}
    for result in results:
        if result.load == lowest and result.figures.num_requests:
            value = result.choices[axis]
            shares[value] = max(shares.get(value, 0.0), result.figures.num_good / result.figures.num_requests)
    text = ", ".join(f"{share:.1%} with {value}" for value, share in shares.items())
    return [f"within the bounds at {lowest:g} times the recorded traffic: {text}"]


def _limits(
    taken: PointResult,
    best: Mapping[tuple[str, ...], PointResult],
    limits: Mapping[tuple[str, ...], LoadLimit],
    results: Sequence[PointResult],
) -> list[str]:
    """Describe the capacity of each value of the axis that is shown, with the others as chosen, if it is known."""
    if all(each.figures.steadiness.verdict == TOO_SHORT for each in results):
        return ["the sustained traffic is unknown: in so short a trace a queue is only filled and drained"]
    axis = _shown_axis(taken.choices)
    others = {name: value for name, value in taken.choices.items() if name != axis}
    texts = [
        f"{best[key].choices[axis]} {_limit(limit)}"
        for key, limit in limits.items()
        if {name: value for name, value in best[key].choices.items() if name != axis} == others
    ]
    lines = [f"times the recorded traffic: {'; '.join(texts)}"]
    if not any(limit.is_decided for limit in limits.values()):
        highest = max(result.load for result in results)
        lines.append(
            f"every setting holds all loads tried, up to {highest:g} times, or all that the trace is long enough for: "
            "limits were not found"
            if all(limit.held is not None for limit in limits.values())
            else "limits were not found for all settings"
        )
    return lines


def _limit(limit: LoadLimit) -> str:
    if limit.held is None:
        return "is undecided" if limit.ended is None or not limit.is_decided else f"does not hold {limit.ended:g}"
    if limit.ended is None:
        return f"holds {limit.held:g}, the highest that was tried"
    return f"holds {limit.held:g} and {'not' if limit.is_decided else 'the trace is too short for'} {limit.ended:g}"
