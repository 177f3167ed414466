"""Timing: repeated, with the garbage collector off, in microseconds, as median and best of all runs."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

__all__ = ["Timing", "timed"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one operation in microseconds.

    Args:
        median_us: of all runs; best_us: the fastest run.
        num_runs: runs that were timed.
    """

    median_us: float
    best_us: float
    num_runs: int

    def divided_by(self, count: int) -> "Timing":
        """Time of one of ``count`` things that each run did."""
        return Timing(self.median_us / count, self.best_us / count, self.num_runs)


def timed(
    run: Callable[[], object], *, num_runs: int, before: Callable[[], object] | None = None, num_warm_ups: int = 2
) -> Timing:
    """Time ``run`` several times; ``before`` is called, untimed, ahead of every run."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for index in range(num_warm_ups + num_runs):
            if before is not None:
                before()
            begin = time.perf_counter_ns()
            run()
            elapsed = time.perf_counter_ns() - begin
            if index >= num_warm_ups:
                times.append(elapsed / 1000)
    finally:
        gc.enable()
    return Timing(median(times), min(times), num_runs)
