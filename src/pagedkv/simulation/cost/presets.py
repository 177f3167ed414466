"""Cost models by name: pairs of a model and the hardware that serves it, and two simple ones for trying things out.

A pair is written ``model/gpu`` or ``model/8xgpu``. Any model preset with any GPU of the table is a name; the pairs
listed here are those with published figures.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.models import model_names, read_model
from pagedkv.simulation.cost.cost_model import CostModel
from pagedkv.simulation.cost.derivation import derive_cost_model, kv_budget_nbytes
from pagedkv.simulation.cost.gpus import find_gpu

__all__ = ["cost_model_named", "cost_model_names"]

SIMPLE: Final[Mapping[str, CostModel]] = MappingProxyType(
    {
        "instant": CostModel(),
        "per-token": CostModel(token_compute_s=1e-3),
    }
)
"""One model without any cost, and one in which each new token takes a millisecond and all else is free."""

PAIRS: Final = (
    "deepseek-v3/8xh200",
    "gemma-2-27b/h100",
    "gemma-3-27b/h100",
    "gpt-oss-120b/h100",
    "gpt-oss-20b/h100",
    "jamba-v0.1/2xa100-80",
    "llama-2-13b/a100-80",
    "llama-2-70b/8xa100-80",
    "llama-2-7b/a100-80",
    "llama-3.1-405b/8xh200",
    "llama-3.1-70b/4xh100",
    "llama-3.1-70b/8xh100",
    "llama-3.1-8b/a100-80",
    "llama-3.1-8b/h100",
    "llama-3.1-8b/h200",
    "llama-3.1-8b/l40s",
    "llama-4-scout/4xh100",
    "mistral-7b-v0.1/l4",
    "mixtral-8x7b/2xh100",
    "opt-13b/a100-40",  # from the PagedAttention paper, like the next one
    "opt-66b/4xa100-40",
    "qwen2.5-72b/4xh100",
    "qwen2.5-7b/l40s",
    "qwen3-32b/2xh100",
    "qwen3-8b/h100",
    "qwen3-next-80b-a3b/4xh100",
)

PAIR: Final = re.compile(r"(?P<model>[^/]+)/(?:(?P<num_gpus>[1-9][0-9]{0,3})x)?(?P<gpu>[^/]+)")


def cost_model_names() -> tuple[str, ...]:
    """Return the simple names and the well-known pairs."""
    return (*SIMPLE, *PAIRS)


def cost_model_named(name: str) -> CostModel | None:
    """Return a cost model by its name; None if the name is unknown (it may be a path).

    Raises:
        ConfigurationError: a known model on an unknown GPU, or on too few GPUs to hold its weights.
    """
    lowered = name.lower()
    if lowered in SIMPLE:
        return SIMPLE[lowered]
    pair = PAIR.fullmatch(lowered)
    if pair is None or pair["model"] not in model_names():
        return None
    model, gpu, num_gpus = read_model(pair["model"]), find_gpu(pair["gpu"]), int(pair["num_gpus"] or 1)
    if kv_budget_nbytes(model, gpu, num_gpus) < model.token_nbytes:
        raise ConfigurationError(f"{name}: the weights leave no room for a single token; use more GPUs")
    return derive_cost_model(model, gpu, num_gpus)
