"""Continuous batching over a block space: which requests decode, prefill, are admitted and preempted in each step.

The modules, in the order in which data flows::

    config      SchedulingConfig, the limits of a step; CacheIntent, a caller's wishes for a request's content
    request     Request: the needs and the progress of one request; Batch: the work of one step; Progress: its results
    keeping     content of ended requests in the cache: leases, supersession, retention
    state       SchedulerState: the waiting, running and swapped-out requests; Loader: loads prefixes from tiers
    growing     the phases for running requests: decode, prefill, preemption where blocks run short; drafts
    admitting   the phase for other requests: admit, swap in, and forks that run at once; promises against thrashing
    scheduler   Scheduler: schedule(), finish(), add(), abort(), abort_in_flight()

The scheduler has no clock, model or trace: an engine passes sampled tokens, a simulation passes scripted ones.
docs/replay.md has the rules.
"""

from pagedkv.scheduling.admitting import longest_alone
from pagedkv.scheduling.config import (
    NO_INTENT,
    Breakpoint,
    CacheIntent,
    PreemptionKind,
    PublishLimit,
    SchedulingConfig,
    require_preemption,
)
from pagedkv.scheduling.request import (
    UNKNOWN_TOKEN,
    Admission,
    Batch,
    Chunk,
    Decoding,
    Drafts,
    Preempted,
    Progress,
    Request,
)
from pagedkv.scheduling.scheduler import AbortedBatches, Scheduler
from pagedkv.scheduling.state import Loader

__all__ = [
    "NO_INTENT",
    "UNKNOWN_TOKEN",
    "AbortedBatches",
    "Admission",
    "Batch",
    "Breakpoint",
    "CacheIntent",
    "Chunk",
    "Decoding",
    "Drafts",
    "Loader",
    "Preempted",
    "PreemptionKind",
    "Progress",
    "PublishLimit",
    "Request",
    "Scheduler",
    "SchedulingConfig",
    "longest_alone",
    "require_preemption",
]
