"""Everything that a plan found out, as one document: what ``--json`` writes and the page is made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pagedkv.budget import GIB
from pagedkv.cli.planning.axes import PlanAxes, PlannedPoint
from pagedkv.report.plan_documents import Plan, PlanPointDocument
from pagedkv.simulation.planning import Decision, Effect, PointFigures, PointResult, decide

__all__ = ["plan_document"]


def plan_document(
    head: Mapping[str, str], axes: PlanAxes, planned: Sequence[PlannedPoint], figures: Sequence[PointFigures]
) -> Plan:
    """Lay a plan out.

    Args:
        head: trace, command and read_as.
        axes: what was asked; planned: its points; figures: what came of each.
    """
    results = [PointResult(each.choices, each.load, found) for each, found in zip(planned, figures, strict=True)]
    decision = decide(results, has_bounds=axes.bounds.are_given)
    return {
        "trace": head["trace"],
        "command": head["command"],
        "read_as": head["read_as"],
        "model": str(planned[0].point.config.model),
        "arrivals": _arrivals(axes),
        "bounds": axes.bounds.as_dict(),
        "warnings": list(_warnings(axes, planned, figures)),
        "headline": decision.headline,
        "reasons": list(decision.reasons),
        "chosen": dict(decision.chosen),
        "effects": [_effect(effect) for effect in decision.effects],
        "points": [_point(each, found, decision) for each, found in zip(planned, figures, strict=True)],
    }


def _arrivals(axes: PlanAxes) -> str:
    if axes.closed_loop:
        return (
            "closed loop: sessions begin as recorded, each further turn a think time after the answer before it (the "
            f"recorded gap less the answer at {axes.answer_speed:g} tokens a second)"
        )
    return "open loop: requests arrive as recorded, however long the answers before them take"


def _warnings(axes: PlanAxes, planned: Sequence[PlannedPoint], figures: Sequence[PointFigures]) -> Iterator[str]:
    if axes.is_cost_model_assumed:
        name = planned[0].point.config.cost_model_name
        yield f"the seconds are those of {name}, for nothing says what this runs on: --gpu or --cost-model do"
    if not figures[0].has_content:
        yield "the trace tells lengths and not content: what would hit is unknown, and nothing is shared"
    num_rejected = max(found.num_rejected for found in figures)
    if num_rejected:
        yield (
            f"with some settings up to {num_rejected:,} of {figures[0].num_requests:,} requests were rejected, being "
            "too large for the pools"
        )


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        **asdict(effect),
        "changes_traffic": effect.changes_traffic,
        "changes_hits": effect.changes_hits,
    }


def _point(planned: PlannedPoint, figures: PointFigures, decision: Decision) -> PlanPointDocument:
    config = planned.point.config
    num_blocks = dict(config.space_config(is_watched=False).blocks_by_pool())
    nbytes = sum(count * config.block_nbytes.get(pool, 0) for pool, count in num_blocks.items())
    return {
        "choices": dict(planned.choices),
        "load": planned.load,
        "is_chosen": dict(planned.choices) == decision.chosen,
        "num_blocks": num_blocks,
        "kv_gib": nbytes / GIB,
        "cost_model_name": str(config.cost_model_name),
        "figures": figures.as_dict(),
    }
