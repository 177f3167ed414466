"""A trace served on a virtual clock. A door: the room is :mod:`pagedkv.planner.simulation`."""

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
