"""Requests through the block space one at a time, without a clock: ``pagedkv replay --one-at-a-time``.

In the order in which data flows::

    replayer   Replayer: serves each request to its end before the next
    summary    ReplaySummary: the result
"""

from pagedkv.planner.simulation.one_at_a_time.replayer import ReplayConfig, Replayer, compile_loops
from pagedkv.planner.simulation.one_at_a_time.summary import ReplayCounts, ReplaySummary

__all__ = ["ReplayConfig", "ReplayCounts", "ReplaySummary", "Replayer", "compile_loops"]
