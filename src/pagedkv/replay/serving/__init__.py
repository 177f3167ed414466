"""A trace served on a virtual clock: continuous batching over the production block space, without a model.

In the order in which data flows::

    sizing        pools and blocks from a model and bytes
    config        ServingConfig: the pools, the limits of a step, the rules
    job           Job: one request under way
    waiting       WaitingQueue: who comes next
    branching     forks into samples, and the replacement of beams
    scheduler     Scheduler: what each step decodes, computes, admits, preempts and swaps
    decode_batch  DecodeBatch: who decodes, in arrays for many steps
    running_rows  RunningRows: who runs, in arrays for the meters
    step_work     StepWork: what a plan computes, for the cost model
    meters        what is measured on the way: waste, ages, latencies, sharing, time series
    result        ServingResult: what came out
    server        VirtualServer: the clock, and all of the above

What exactly happens in a step is told in docs/replay.md.
"""

from pagedkv.replay.serving.config import ServingConfig
from pagedkv.replay.serving.result import ServingResult
from pagedkv.replay.serving.server import VirtualServer, compile_loops

__all__ = ["ServingConfig", "ServingResult", "VirtualServer", "compile_loops"]
