"""A plan as one buffer of words. Public import path of :mod:`pagedkv.memory.contract.plan_buffer`."""

from pagedkv.memory.contract.plan_buffer import (
    PlanLayout,
    add_moves,
    open_buffer,
    padded,
    read_directory,
    read_fingerprint,
    read_step_id,
)

__all__ = [
    "PlanLayout",
    "add_moves",
    "open_buffer",
    "padded",
    "read_directory",
    "read_fingerprint",
    "read_step_id",
]
