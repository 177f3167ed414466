"""Figures made up part by part, for what is concluded from them."""

from pagedkv.simulation.planning import PointFigures, PointResult
from pagedkv.simulation.planning.figures import NUM_PARTS, Part

__all__ = ["figures", "result"]

NONE: dict[str, float | None] = dict.fromkeys(("mean", "p50", "p90", "p99"))


def figures(
    good: tuple[int, ...] = (10,) * NUM_PARTS,
    hits: tuple[int, ...] = (100,) * NUM_PARTS,
    *,
    span_s: float = 10.0,
    offered_s: float = 80.0,
    has_content: bool = True,
) -> PointFigures:
    """Make figures of parts with so many good answers of ten, and hits of a thousand tokens."""
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
        parts=parts,
    )


def result(found: PointFigures, load: float = 1.0, **choices: str) -> PointResult:
    """Make the result of a setting."""
    return PointResult({name.replace("_", " "): value for name, value in choices.items()}, load, found)
