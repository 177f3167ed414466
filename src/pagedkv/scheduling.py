"""Continuous batching over a block space. Public import path of :mod:`pagedkv.memory.scheduling`."""

from pagedkv.memory.scheduling import (
    Admission,
    Batch,
    Breakpoint,
    CacheIntent,
    Chunk,
    Decoding,
    Drafts,
    Preempted,
    PreemptionKind,
    Progress,
    Request,
    Scheduler,
    SchedulingConfig,
)

__all__ = [
    "Admission",
    "Batch",
    "Breakpoint",
    "CacheIntent",
    "Chunk",
    "Decoding",
    "Drafts",
    "Preempted",
    "PreemptionKind",
    "Progress",
    "Request",
    "Scheduler",
    "SchedulingConfig",
]
