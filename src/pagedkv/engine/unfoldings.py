"""Latents without unfolding them. A door: the room is :mod:`pagedkv.serving.engine.unfoldings`."""

from pagedkv.serving.engine.unfoldings import (
    Unfoldings,
    read_unfoldings,
)

__all__ = [
    "Unfoldings",
    "read_unfoldings",
]
