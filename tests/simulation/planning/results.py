"""Figures made up part by part, for what is concluded from them."""

from pagedkv.simulation.planning import PointFigures, PointResult, Steadiness
from pagedkv.simulation.planning.figures import FAILS, NUM_PARTS, Part

__all__ = ["figures", "result", "steadiness"]

NONE: dict[str, float | None] = dict.fromkeys(("mean", "p50", "p90", "p99"))


def figures(  # noqa: PLR0913 - what differs from one made-up run to another, by keywords
    good: tuple[int, ...] = (10,) * NUM_PARTS,
    hits: tuple[int, ...] = (100,) * NUM_PARTS,
    *,
    span_s: float = 10.0,
    offered_s: float = 80.0,
    has_content: bool = True,
    verdict: str = FAILS,
) -> PointFigures:
    """Make figures of parts with so many good answers of ten and hits of a thousand tokens; the load fails by TTFT."""
    parts = tuple(Part(1000, hit, 10, num, span_s) for num, hit in zip(good, hits, strict=True))
    return PointFigures(
        num_requests=10 * NUM_PARTS,
        num_rejected=0,
        num_finished=10 * NUM_PARTS,
        num_good=sum(good),
        has_content=has_content,
        num_prompt_tokens=1000 * NUM_PARTS,
        num_hit_tokens=sum(hits),
        num_output_tokens=100,
        span_s=span_s * NUM_PARTS,
        offered_s=offered_s,
        busy_s=1.0,
        num_steps=5,
        num_preemptions=0,
        ttft_s=NONE,
        tpot_s=NONE,
        itl_s=NONE,
        waited_s={"sequences": 0.0, "tokens": 0.6, "memory": 0.2},
        peak_live={"full": 7},
        parts=parts,
        steadiness=steadiness(verdict, sum(good), offered_s),
    )


def result(found: PointFigures, load: float = 1.0, **choices: str) -> PointResult:
    """Make the result of a setting."""
    return PointResult({name.replace("_", " "): value for name, value in choices.items()}, load, found)


def steadiness(verdict: str, num_good: int = 60, measured_s: float = 60.0) -> Steadiness:
    """Make up whether a load holds."""
    return Steadiness(
        verdict=verdict,
        binds=("queue", "ttft") if verdict == FAILS else (),
        warm_up_s=20.0,
        measured_s=measured_s,
        least_s=30.0,
        num_measured=80,
        num_good=num_good,
        num_good_prompt_tokens=9000,
        num_good_output_tokens=1000,
        num_late=20,
        num_slow=0,
        num_rejected=0,
        ttft_s=4.5,
        tpot_s=0.05,
        num_waiting=(2.0, 9.0),
    )
