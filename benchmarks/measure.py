"""Timing: repeated, with the garbage collector off, in microseconds, as median and best of all runs."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

__all__ = ["BAR_COMMIT", "Row", "Timing", "timed"]

BAR_COMMIT: Final = "b7c260a"
"""The commit that every ``Row.bar_ratio`` is a ratio to."""


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


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line.

    Args:
        operation: what was done; timing: how long; unit: of what ("call", "step", "block").
        bar_us: the bar to meet, if any; naive_us: the object-a-block yardstick in the same run, if measured.
        bar_ratio: the bar as a ratio to BAR_COMMIT, measured in one run on one machine, if any.
    """

    operation: str
    timing: Timing
    unit: str = "call"
    bar_us: float | None = None
    naive_us: float | None = None
    bar_ratio: float | None = None


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
