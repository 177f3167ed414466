"""The duration of one step of an engine, as a function of its work.

In the order in which data flows::

    cost_model  CostModel: seconds from counts, by a roofline; CostOrigin: where they come from
    presets     GPUs, models on them by name or by data sheet, and files of cost models

All are pure functions without a clock. A replay computes the seconds of a step, and advances its own clock by them.
"""

from pagedkv.simulation.cost.cost_model import CostModel, CostOrigin
from pagedkv.simulation.cost.presets import (
    Assumptions,
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
