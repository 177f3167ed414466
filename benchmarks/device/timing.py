"""Timing on a GPU: by events around graphs and streams, as median and best of many runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch

__all__ = ["ASLEEP_CYCLES", "Figure", "by_graph", "elapsed_us", "figure", "on_host"]


ASLEEP_CYCLES: Final = 2_000_000
"""A millisecond."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured line.

    Args:
        name: what was done; value: the median; best: of all runs; unit: of both.
        bar: what it should reach; is_least: whether it is to be at least that, rather than at most.
    """

    name: str
    value: float
    best: float
    unit: str
    bar: float | None = None
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the bar is reached; without a bar it is."""
        if self.bar is None:
            return True
        return self.value >= self.bar if self.is_least else self.value <= self.bar

    @property
    def line(self) -> str:
        """The figure as a row of a table: name, median, best, unit, bar, and whether that is met."""
        bar = "" if self.bar is None else f"{'>=' if self.is_least else '<='} {self.bar:g}"
        verdict = "" if self.bar is None else "met" if self.is_met else "MISSED"
        return f"{self.name:<72} {self.value:>9.2f} {self.best:>9.2f} {self.unit:<5} {bar:<8} {verdict}"


def elapsed_us(run: Callable[[], object], stream: torch.cuda.Stream | None = None) -> float:
    """Time what ``run`` puts into a stream, in microseconds, from when the device begins with it.

    The stream sleeps meanwhile, so that what the host does to put it there is not counted.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(ASLEEP_CYCLES)
    begin.record(stream)
    run()
    end.record(stream)
    torch.cuda.synchronize()
    return 1000 * float(begin.elapsed_time(end))


def by_graph(runs: Sequence[Callable[[], object]], num_runs: int) -> list[float]:
    """Time work on the device, in microseconds each: all of ``runs`` captured in one graph, which is replayed."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return [elapsed_us(graph.replay) / len(runs) for _ in range(num_runs + 3)][3:]


def on_host(run: Callable[[], object], num_runs: int) -> list[float]:
    """Time calls on the host, in microseconds; the device is idle before each."""
    times = []
    for index in range(num_runs + 5):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        elapsed = time.perf_counter() - begin
        if index >= 5:
            times.append(1e6 * elapsed)
    return times


def figure(
    name: str, times: Sequence[float], unit: str = "us", *, bar: float | None = None, is_least: bool = False
) -> Figure:
    """Make a figure of several runs."""
    return Figure(name, median(times), max(times) if is_least else min(times), unit, bar, is_least)
