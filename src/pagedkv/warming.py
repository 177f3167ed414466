"""Compilation of loops before the first request. Public import path of :mod:`pagedkv.memory.warming`."""

from pagedkv.memory.warming import (
    ATTENTION,
    WarmUp,
    make_ready,
    of_curves,
    of_model_curves,
    of_spaces,
    of_stores,
    warm_up,
)

__all__ = [
    "ATTENTION",
    "WarmUp",
    "make_ready",
    "of_curves",
    "of_model_curves",
    "of_spaces",
    "of_stores",
    "warm_up",
]
