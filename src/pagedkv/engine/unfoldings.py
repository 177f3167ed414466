"""Attention to latents without unfolding them. Public import path of :mod:`pagedkv.serving.engine.unfoldings`."""

from pagedkv.serving.engine.unfoldings import (
    Unfoldings,
    read_unfoldings,
)

__all__ = [
    "Unfoldings",
    "read_unfoldings",
]
