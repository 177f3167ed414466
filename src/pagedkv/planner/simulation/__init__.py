"""A trace served on a virtual clock: continuous batching over the production block space, without a model.

In the order in which data flows::

    cost              CostModel: how long a step takes
    calibration       the same, fitted to steps that were measured
    config            ServingConfig: the pools, the limits of a step, the rules
    scripted_sampler  what will be generated, in a model's place
    output_store      outputs of the requests under way, in one array
    space_watch       SpaceWatch: what follows the block space, and knows its blocks' history
    running_rows      RunningRows: who runs, in arrays for the meters
    step_work         StepWork: what a plan computes, for the cost model
    request_timings   RequestTimings: what else is known of each request under way
    meters            what is measured on the way: waste, ages, latencies, sharing, time series
    result            ServingResult: what came out
    queue_file        QueueFile: who arrived long before their turn, in a file
    virtual_clock     VirtualClock: the loop over steps
    server            VirtualServer: the clock, and all of the above
    planning          many settings on one trace, with few meters, and what they tell
    one_at_a_time     instead of all that: one request after another, without a clock

What exactly happens in a step is told in docs/replay.md.
"""

from pagedkv.planner.simulation.config import ServingConfig
from pagedkv.planner.simulation.result import ServingResult
from pagedkv.planner.simulation.server import VirtualServer, compile_loops

__all__ = ["ServingConfig", "ServingResult", "VirtualServer", "compile_loops"]
