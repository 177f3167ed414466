"""A trace served on a virtual clock. Public import path of :mod:`pagedkv.planner.simulation`."""

from pagedkv.planner.simulation import (
    ServingConfig,
    ServingResult,
    VirtualServer,
    compile_loops,
)

__all__ = [
    "ServingConfig",
    "ServingResult",
    "VirtualServer",
    "compile_loops",
]
