"""The time that a step takes. Public import path of :mod:`pagedkv.planner.simulation.cost`."""

from pagedkv.planner.simulation.cost import (
    Assumptions,
    CostModel,
    CostOrigin,
    Gpu,
    cost_model_names,
    derive_cost_model,
    find_gpu,
    gpu_names,
    kv_budget_nbytes,
    read_cost_model,
    read_cost_origin,
)

__all__ = [
    "Assumptions",
    "CostModel",
    "CostOrigin",
    "Gpu",
    "cost_model_names",
    "derive_cost_model",
    "find_gpu",
    "gpu_names",
    "kv_budget_nbytes",
    "read_cost_model",
    "read_cost_origin",
]
