"""Continuous batching over a block space: who decodes, prefills, is admitted and preempted in each step.

In the order in which data flows::

    config      SchedulingConfig: the limits of a step, and what preemption does
    request     Request: what is wanted, and how far it has come
    waiting     WaitingQueue: who comes next
    decoding    Decoding: who decodes together, in arrays
    batch       Batch: what one step does; Progress: what came of it
    state       SchedulerState: who waits, runs and is swapped out
    branching   forks into samples, and the replacement of beams
    preempting  whose blocks are taken away when they run short
    promises    what keeps a short pool from thrashing
    growing     the phases that serve those who run: decode and prefill
    admitting   the phase that lets others run: admit and swap in
    drafting    the phase that appends guesses where there is room to spare, and takes back those that were wrong
    finishing   what the sampled tokens change
    scheduler   Scheduler: schedule(), finish(), add(), abort()

Knows neither a clock nor a model nor a trace: an engine brings tokens that it sampled, a simulation scripted ones.
docs/replay.md tells the rules.
"""

from pagedkv.memory.scheduling.batch import Admission, Batch, Chunk, Drafts, Preempted, Progress
from pagedkv.memory.scheduling.config import PreemptionKind, SchedulingConfig, require_preemption
from pagedkv.memory.scheduling.decoding import Decoding
from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.scheduling.scheduler import Scheduler

__all__ = [
    "Admission",
    "Batch",
    "Chunk",
    "Decoding",
    "Drafts",
    "Preempted",
    "PreemptionKind",
    "Progress",
    "Request",
    "Scheduler",
    "SchedulingConfig",
    "require_preemption",
]
