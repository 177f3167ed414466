"""A trace served on a virtual clock: continuous batching over the production block space, without a model.

In the order in which data flows::

    cost              CostModel: the duration of a step
    calibration       a CostModel fitted to measured steps
    config            ServingConfig: the pools, the limits of a step, the rules
    meters            measurements: waste, ages, latencies, sharing, time series;
                      StepWork: counts of a plan's work; RequestLog: times and hits of each request
    tiers             SimulatedTiers: tiers below the device, by the production store core
    virtual_clock     VirtualClock: the loop over steps, and what it notifies of each; generated tokens
    server            VirtualServer: the clock with all meters; ServingResult: all figures;
                      RequestsUnderWay: the requests from arrival to end, for live views
    cluster           VirtualCluster: several clocks behind the production router
    planning          many settings on one trace, with few meters, and a decision

docs/replay.md describes a step exactly.
"""

from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.server import ServingResult, VirtualServer, compile_loops
from pagedkv.simulation.tiers import SimulatedTier

__all__ = ["ServingConfig", "ServingResult", "SimulatedTier", "VirtualServer", "compile_loops"]
