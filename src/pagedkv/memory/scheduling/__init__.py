"""Continuous batching over a block space: which requests decode, prefill, are admitted and preempted in each step.

The modules, in the order in which data flows::

    config      SchedulingConfig: the limits of a step, and what preemption does
    intent      CacheIntent: what a caller says about a request's content
    request     Request: what a request needs, and its progress
    waiting     WaitingQueue: the requests that wait, in order
    keeping     what requests leave in the cache: leases, supersession, retention
    decoding    Decoding: the sequences that decode together, in arrays
    batch       Batch: what one step does; Progress: its results
    loader      Loader: what brings prefixes from tiers before an admission
    state       SchedulerState: the requests that wait, run and are swapped out
    branching   forks into samples, and the replacement of beams
    preempting  which request is preempted when blocks run short
    promises    reserved room that keeps a short pool from thrashing
    growing     the phases for running requests: decode and prefill
    admitting   the phase that lets further requests run: admit and swap in
    drafting    the phase that appends drafts where there is spare room, and rolls rejected ones back
    finishing   what the sampled tokens change
    aborting    AbortedBatches: batches whose step failed are undone
    scheduler   Scheduler: schedule(), finish(), add(), abort(), abort_in_flight()

There is no clock, model or trace here: an engine passes tokens that it sampled, a simulation passes scripted ones.
docs/replay.md has the rules.
"""

from pagedkv.memory.scheduling.aborting import AbortedBatches
from pagedkv.memory.scheduling.batch import Admission, Batch, Chunk, Drafts, Preempted, Progress
from pagedkv.memory.scheduling.config import PreemptionKind, SchedulingConfig, require_preemption
from pagedkv.memory.scheduling.decoding import UNKNOWN_TOKEN, Decoding
from pagedkv.memory.scheduling.intent import NO_INTENT, Breakpoint, CacheIntent, PublishLimit
from pagedkv.memory.scheduling.loader import Loader
from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.scheduling.scheduler import Scheduler

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
