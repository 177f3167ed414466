"""A model's groups and bytes, read from its config. Public import path of :mod:`pagedkv.planner.models`."""

from pagedkv.planner.models import (
    LayerGroup,
    ModelMemory,
    model_names,
    read_model,
)

__all__ = [
    "LayerGroup",
    "ModelMemory",
    "model_names",
    "read_model",
]
