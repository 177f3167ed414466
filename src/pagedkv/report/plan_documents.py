"""The document of ``pagedkv plan --json``, as a plain dict; see :mod:`pagedkv.report.documents`."""

from collections.abc import Mapping
from typing import Any, TypedDict

from pagedkv.report.documents import Seconds

__all__ = ["BesideDocument", "Plan", "PlanPointDocument", "PlanSettingDocument", "traffic_of"]


class BesideDocument(TypedDict):
    """A run that a cluster is compared with: routing in turn, or one pool, whose hits alone are comparable."""

    name: str
    hit_ratio: float | None
    imbalance: float | None
    ttft_s: dict[str, float | None] | None


class PlanSettingDocument(TypedDict):
    """The load limit of a setting: the highest load that held, the lowest that did not or is undecided; its price."""

    choices: dict[str, str]
    held: float | None
    ended: float | None
    is_decided: bool
    sustained_per_s: float | None
    cost: dict[str, float | None] | None
    beside: list[BesideDocument]


class PlanPointDocument(TypedDict):
    """One setting under one load: its choices, and its figures (``PointFigures.as_dict``)."""

    choices: dict[str, str]
    load: float
    is_chosen: bool
    num_blocks: dict[str, int]
    kv_gib: float
    cost_model_name: str
    verdict: str
    binds: list[str]
    reason: str
    change: str
    figures: dict[str, Any]


class Plan(TypedDict):
    """All results: the decision, its basis, every point, and the parts of the chosen one."""

    trace: str
    command: str
    read_as: str
    model: str
    arrivals: str
    bounds: dict[str, float | None]
    seconds: Seconds
    loads: str
    prices: dict[str, float]
    warnings: list[str]
    need: dict[str, Any]
    headline: str
    reasons: list[str]
    chosen: dict[str, str]
    effects: list[dict[str, Any]]
    settings: list[PlanSettingDocument]
    points: list[PlanPointDocument]
    divided: dict[str, Any]


def traffic_of(figures: Mapping[str, Any]) -> float:
    """Return the good answers a second: by arrivals if the load holds, as in the headline; else over the whole run."""
    steady = figures["steadiness"]
    holds = steady["verdict"] == "holds"
    return float(steady["num_good"] / steady["measured_s"] if holds else figures["goodput_per_s"])
