"""The decision of a plan: effects of choices, reasons, and the headline.

The gain of one choice over another is paired, over all other choices that were tried, and has an uncertainty. Two
settings that differ in one choice alone serve the same requests, so they are compared part by part of the trace. The
traffic of a setting is that under the highest load that it holds. If no setting holds any, it is the highest number of
answers a second within the bounds, over all loads. Each value of an axis is compared with the first one: by the
geometric mean of the ratios of traffic, and the mean difference of hit ratios, over all pairs. For traffic, pairs in
which neither setting has significant traffic are left out. The interval is that of the jackknife (Quenouille 1956;
Tukey 1958): the movement of the estimate when one eighth of the trace is left out. Neighbouring parts are similar, so
the interval is somewhat too narrow. If loads were searched, the capacity of a setting lies between the highest load
that held and the lowest that did not, and the interval is widened by that.

The recommended setting and its reasons are plain words with figures, on one screen. For each axis, the value with the
most traffic is chosen, then the one with the most hits. Without a difference the first value is kept, since users type
their present setting first. The capacity of a setting is its highest load that holds; if the trace is too short to find
it, the text states this. Prices are not known here, so the text has the figures of every value of hardware and memory,
and the traffic of each GPU.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from pagedkv.planner.results import Result
from pagedkv.simulation.planning.figures import (
    HOLDS,
    LEAST_REQUESTS,
    NUM_PARTS,
    TOO_SHORT,
    Bounds,
    PointFigures,
    Steadiness,
)
from pagedkv.simulation.planning.interval import LoadInterval
from pagedkv.simulation.planning.point import PlanPoint
from pagedkv.simulation.planning.searching import LoadLimit, limit_of

IN_SHORT: Final[Mapping[str, str]] = {
    "queue": "the queue grows",
    "ttft": "first tokens are late",
    "tpot": "further tokens are slow",
    "rejected": "requests are too large for the pools",
}
"""Causes for which a load does not hold."""
LEAST_WAITING: Final = 0.05
"""Share of the seconds of steps; shorter waits are not named."""
WHOLE_SECONDS_FROM: Final = 100


def reason_of(figures: PointFigures, bounds: Bounds) -> str:
    """Describe whether a load holds, and the bound that it exceeds or comes nearest to."""
    steady = figures.steadiness
    if steady.verdict == TOO_SHORT:
        return f"too short to decide: {_shortness(steady)}"
    if steady.verdict == HOLDS:
        return "; ".join([f"holds: {_good(steady, bounds)}, and the queue does not grow", *_nearest(steady, bounds)])
    return "; ".join(["does not hold", *_broken(steady, bounds)])


def change_of(figures: PointFigures, point: PlanPoint) -> str:
    """Describe a remedy for a load that fails, by the resource that requests wait for; empty for one that holds.

    A resource is called full only if it was full for the larger part of the time in which requests waited.
    """
    if not figures.steadiness.binds:
        return ""
    waited_s = figures.waited_s
    most = max(waited_s, key=lambda name: waited_s[name])
    config = point.config
    if waited_s[most] < LEAST_WAITING * figures.busy_s:
        if "tpot" in figures.steadiness.binds:
            return (
                "steps take too long, and few requests wait: fewer tokens a step (`max_batched_tokens`), fewer "
                "sequences (`max_sequences`), or faster GPUs"
            )
        return "few requests wait to be admitted, and computing prompts takes too long: faster GPUs, or a longer bound"
    share = f"for {waited_s[most] / figures.busy_s:.0%} of the time requests wait because "
    match most:
        case "sequences":
            return (
                f"{share}{config.max_sequences:,} sequences run, which is the limit: a higher one (`max_sequences`), "
                "where memory and the bounds leave room, or more GPUs"
            )
        case "tokens":
            return (
                f"{share}steps compute {config.max_batched_tokens:,} tokens, which is the limit: more or faster GPUs, "
                "or more hits; larger steps (`max_batched_tokens`) only where slower tokens are acceptable"
            )
        case _:
            return (
                f"{share}blocks run out: more memory for keys and values (more GPUs, `memory`), or smaller ones "
                "(`kv_dtype=fp8`)"
            )


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits, and never an exponent."""
    return f"{seconds:,.0f} s" if seconds >= WHOLE_SECONDS_FROM else f"{seconds:.3g} s"


def _shortness(steady: Steadiness) -> str:
    if steady.measured_s < steady.least_s:
        return (
            f"after the warm-up requests arrive for {seconds_text(steady.measured_s)}, and "
            f"{seconds_text(steady.least_s)} are needed"
        )
    return f"after the warm-up {steady.num_measured:,} requests arrive, and {LEAST_REQUESTS} are needed"


def _good(steady: Steadiness, bounds: Bounds) -> str:
    share = steady.num_good / max(1, steady.num_measured)
    return f"{share:.1%} of the requests {'keep the bounds' if bounds.are_given else 'are answered'}"


def _nearest(steady: Steadiness, bounds: Bounds) -> Iterator[str]:
    known = [
        (kept / bound, name, kept, bound)
        for name, kept, bound in (
            ("ttft_s", steady.ttft_s, bounds.ttft_s),
            ("tpot_s", steady.tpot_s, bounds.tpot_s),
        )
        if kept is not None and bound is not None
    ]
    if known:
        _, name, kept, bound = max(known)
        within = f"nine of ten are within {seconds_text(kept)}, and {seconds_text(bound)} are allowed"
        yield f"the nearest bound is `{name}`: {within}"


def _broken(steady: Steadiness, bounds: Bounds) -> Iterator[str]:
    num = max(1, steady.num_measured)
    for bind in steady.binds:
        match bind:
            case "queue":
                third, fourth = steady.num_waiting
                yield f"the queue grows, from {third:,.1f} requests in the third quarter to {fourth:,.1f} in the fourth"
            case "rejected":
                yield f"{steady.num_rejected / num:.1%} of the requests are too large for the pools"
            case "ttft":
                kept = "" if steady.ttft_s is None else f": nine of ten are within {seconds_text(steady.ttft_s)}"
                yield f"{steady.num_late / num:.1%} begin later than `ttft_s={bounds.ttft_s:g}` allows{kept}"
            case _:
                kept = "" if steady.tpot_s is None else f": nine of ten are within {seconds_text(steady.tpot_s)}"
                yield f"{steady.num_slow / num:.1%} decode more slowly than `tpot_s={bounds.tpot_s:g}` allows{kept}"


def _ended(limit: LoadLimit) -> str:
    if limit.ended is None:
        return " (the highest that was tried)"
    return f" ({limit.ended:g} times {'does not hold' if limit.is_decided else 'is undecided: the trace is too short'})"


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
class Effect(Result):
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

    DERIVED: ClassVar = ("changes_traffic", "changes_hits")

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


GPU_AXIS: Final = "gpu"
REPLICAS_AXIS: Final = "replicas"
TRAFFIC: Final = "the traffic"
SPEED: Final = "the speed at which these requests are answered"
WHOLE_RATIO_FROM: Final = 10
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


def decide(
    results: Sequence[PointResult],
    bounds: Bounds,
    *,
    is_searched: bool = False,
    interval: LoadInterval | None = None,
) -> Decision:
    """Choose among settings that were run.

    Args:
        results: one or more runs, of settings with the same axes.
        bounds: bounds of good answers; without any, all answers are good.
        is_searched: whether loads were searched instead of given.
        interval: of the setting that is chosen, which is that of a decision without it; None: there is none.
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
        *(() if interval is None else interval.reasons),
        *_limits(taken, best, limits, results),
        *(_sentence(effect, what) for effect in effects),
        *_per_gpu(best, limits),
        *(_good_shares(results) if bounds.are_given else ()),
    ]
    headline = _headline(taken, first, answers, limits[tuple(chosen.values())], interval)
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


def _headline(
    taken: PointResult, first: PointResult, answers: str, limit: LoadLimit, interval: LoadInterval | None
) -> str:
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
        return f"None of the settings gives {answers} ({_why(figures)}): the bounds, the load or the memory must change"
    at_load = "the recorded traffic" if taken.load == 1 else f"{taken.load:g} times the recorded traffic"
    if verdict == HOLDS:
        sustained = f"sustains {traffic:.3g} {answers}" if interval is None else interval.text(answers)
        text = f"{_named(taken)}: {sustained}, {at_load}{_ended(limit)}"
    else:
        text = f"{_named(taken)}: {traffic:.3g} {answers} at {at_load}, which it does not hold ({_why(figures)})"
    if stays:
        return f"{verb} {text}; no other setting that was tried serves significantly more"
    if not serves(first.figures):
        return f"{verb} {text}, where {_named(first)} serves almost none"
    return f"{verb} {text}, {_times(traffic / first_traffic)} what {_named(first)} serves"


def _why(figures: PointFigures) -> str:
    """Say in short why a load does not hold."""
    return ", ".join(IN_SHORT[bind] for bind in figures.steadiness.binds) or "no answer counts"


def _rate(result: PointResult) -> float:
    """Return the answers a second of a setting: by arrivals if its load holds, else over the whole run."""
    steady = result.figures.steadiness
    return steady.good_per_s if steady.verdict == HOLDS else traffic_per_s(result.figures)


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= WHOLE_RATIO_FROM else f"{ratio:.2g}x"


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
