"""Continuous batching over a block space: which requests decode, prefill, are admitted and preempted in each step.

The modules, in the order in which data flows::

    config      SchedulingConfig: the limits of a step, and the kind of preemption
    intent      CacheIntent: a caller's wishes for a request's content: tenant, leases, retention, publishing
    request     Request: the needs and the progress of one request
    waiting     WaitingQueue: the waiting requests, in order of admission
    keeping     content of ended requests in the cache: leases, supersession, retention
    decoding    Decoding: the sequences that decode together, in arrays
    batch       Batch: the work of one step; Progress: its results
    loader      Loader: the interface that loads prefixes from tiers before an admission
    state       SchedulerState: the waiting, running and swapped-out requests
    branching   forks into samples, and the replacement of beams
    preempting  chooses and preempts a request when blocks run short
    promises    reserved room that prevents thrashing in a small pool
    growing     the phases for running requests: decode and prefill
    admitting   the phase for other requests: admit and swap in
    drafting    the phase that appends drafts if there is spare room, and the rollback of rejected ones
    finishing   applies the sampled tokens
    aborting    AbortedBatches: undoes batches whose step failed
    scheduler   Scheduler: schedule(), finish(), add(), abort(), abort_in_flight()

The scheduler has no clock, model or trace: an engine passes sampled tokens, a simulation passes scripted ones.
docs/replay.md has the rules.
"""

from pagedkv.scheduling.aborting import AbortedBatches
from pagedkv.scheduling.batch import Admission, Batch, Chunk, Drafts, Preempted, Progress
from pagedkv.scheduling.config import PreemptionKind, SchedulingConfig, require_preemption
from pagedkv.scheduling.decoding import UNKNOWN_TOKEN, Decoding
from pagedkv.scheduling.intent import NO_INTENT, Breakpoint, CacheIntent, PublishLimit
from pagedkv.scheduling.loader import Loader
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.scheduler import Scheduler

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
    "require_preemption",
]
