"""Figures by tenant and by window of recorded time, for humans and for JSON; the same for a replay and a plan."""

from collections.abc import Iterator, Sequence
from typing import Any

from pagedkv.cli.tables import print_numbers, shown_parts
from pagedkv.report.key_figures import rate
from pagedkv.simulation.planning.figures import TENANT, WINDOW, PartFigures, busiest_and_quietest

__all__ = ["extremes_in_words", "parts_as_dict", "print_parts"]


def parts_as_dict(parts: Sequence[PartFigures]) -> dict[str, Any]:
    """Return parts for JSON, by kind, with the busiest and the quietest window; missing ones are left out."""
    by_kind = {
        f"by_{kind}": [part.as_dict() for part in parts if part.kind == kind]
        for kind in (TENANT, WINDOW)
        if any(part.kind == kind for part in parts)
    }
    extremes = busiest_and_quietest(parts)
    if extremes is None:
        return by_kind
    busiest, quietest = extremes
    return {**by_kind, "busiest_window": busiest.name, "quietest_window": quietest.name}


def extremes_in_words(parts: Sequence[PartFigures]) -> str | None:
    """Describe the busiest and the quietest window; None unless there are several."""
    extremes = busiest_and_quietest(parts)
    if extremes is None:
        return None
    texts = (
        f"{name} {part.name} ({_load(part)})" for name, part in zip(("busiest", "quietest"), extremes, strict=True)
    )
    return ", ".join(texts)


def print_parts(parts: Sequence[PartFigures], *, has_bounds: bool = False) -> None:
    """Print a table for each kind of parts."""
    for kind in dict.fromkeys(part.kind for part in parts):
        chosen = [part for part in parts if part.kind == kind]
        shown, note = shown_parts(chosen, [part.num_offered_tokens for part in chosen])
        extremes = extremes_in_words(chosen)
        title = "By tenant" if kind == TENANT else "By window of recorded time"
        print_numbers(
            f"{title}{note}{f': {extremes}' if extremes else ''}",
            _headings(kind, has_bounds=has_bounds),
            [tuple(_cells(part, has_bounds=has_bounds)) for part in shown],
        )


def _headings(kind: str, *, has_bounds: bool) -> list[str]:
    rates = ["requests/s", "tokens/s"] if kind == WINDOW else []
    good = ["good"] if has_bounds else []
    tokens = ["prompt tokens", "output tokens"]
    times = ["TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
    return [kind, "requests", *rates, *tokens, "hit ratio", *good, *times]


def _cells(part: PartFigures, *, has_bounds: bool) -> Iterator[str]:
    yield part.name
    yield f"{part.num_requests:,}"
    if part.kind == WINDOW:
        yield f"{part.num_requests / part.span_s:.3g}" if part.span_s else "-"
        yield rate(part.offered_per_s) if part.span_s else "-"
    yield f"{part.num_prompt_tokens:,}"
    yield f"{part.num_output_tokens:,}"
    yield ("unknown" if not part.has_content else "-") if part.hit_ratio is None else f"{part.hit_ratio:.2%}"
    if has_bounds:
        yield f"{part.num_good / part.num_requests:.1%}" if part.num_requests else "-"
    for times_s in (part.ttft_s, part.tpot_s):
        for seconds in times_s.values():
            yield "-" if seconds is None else f"{seconds:,.3f}"


def _load(part: PartFigures) -> str:
    return f"{rate(part.offered_per_s)} tokens/s requested"
