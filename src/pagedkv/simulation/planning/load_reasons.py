"""Explains why a load holds or fails: the bound that is exceeded, the resource that requests wait for, and a remedy."""

from collections.abc import Iterator
from typing import Final

from pagedkv.simulation.planning.bounds import Bounds
from pagedkv.simulation.planning.figures import PointFigures
from pagedkv.simulation.planning.point import PlanPoint
from pagedkv.simulation.planning.steadiness import HOLDS, LEAST_REQUESTS, TOO_SHORT, Steadiness

__all__ = ["change_of", "reason_of", "seconds_text"]

LEAST_WAITING: Final = 0.05
"""Share of the seconds of steps; shorter waits are not named."""
WHOLE_FROM: Final = 100


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
    return f"{seconds:,.0f} s" if seconds >= WHOLE_FROM else f"{seconds:.3g} s"


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
