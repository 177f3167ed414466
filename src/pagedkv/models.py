"""A model's groups and bytes, read from its config. A door: the room is :mod:`pagedkv.planner.models`."""

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
