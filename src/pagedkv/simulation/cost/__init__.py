"""The duration of one step of an engine, as a function of its work.

In the order in which data flows::

    gpus        published peak numbers of well-known GPUs
    cost_model  CostModel: seconds from counts, by a roofline
    derivation  a CostModel and a KV budget from a model's memory and a GPU's numbers
    origin      CostOrigin: a data sheet, measured steps with the error of the fit, or a statement
    presets     pairs of model and hardware, by name
    reader      read_cost_model(): a file or a name in, a CostModel out

All are pure functions without a clock. A replay computes the seconds of a step, and advances its own clock by them.
"""

from pagedkv.simulation.cost.cost_model import CostModel
from pagedkv.simulation.cost.derivation import Assumptions, derive_cost_model, kv_budget_nbytes
from pagedkv.simulation.cost.gpus import Gpu, find_gpu, gpu_names
from pagedkv.simulation.cost.origin import CostOrigin
from pagedkv.simulation.cost.presets import cost_model_names
from pagedkv.simulation.cost.reader import read_cost_model, read_cost_origin

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
