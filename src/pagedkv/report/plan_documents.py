"""The document of ``pagedkv plan --json``, as a plain dict; see :mod:`pagedkv.report.documents`."""

from typing import Any, TypedDict

__all__ = ["Plan", "PlanPointDocument"]


class PlanPointDocument(TypedDict):
    """One setting under one load: what was chosen, and what came of it (``PointFigures.as_dict``)."""

    choices: dict[str, str]
    load: float
    is_chosen: bool
    num_blocks: dict[str, int]
    kv_gib: float
    cost_model_name: str
    figures: dict[str, Any]


class Plan(TypedDict):
    """Everything found out: the decision in words, what it rests on, and every point."""

    trace: str
    command: str
    read_as: str
    model: str
    arrivals: str
    bounds: dict[str, float | None]
    warnings: list[str]
    headline: str
    reasons: list[str]
    chosen: dict[str, str]
    effects: list[dict[str, Any]]
    points: list[PlanPointDocument]
