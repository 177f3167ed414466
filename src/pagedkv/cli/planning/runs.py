"""Points in separate processes, a given number at once, with one progress bar.

Workers run until no point is left, so that each loads the compiled loops once; all loops are on disk before the first
worker starts. Workers ignore Ctrl-C; the parent process handles it, keeps finished points and ends the workers. Figures
are equal for any number of processes.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final

from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.trace_options import SeveralTimedTracesOptions
from pagedkv.cli.trace_sources import TraceSources
from pagedkv.errors import ConfigurationError, InterruptedRunError, TraceError
from pagedkv.simulation import compile_loops
from pagedkv.simulation.planning import PlanPoint, PointFigures, run_point
from pagedkv.simulation.planning.figures import Division
from pagedkv.warming import ROUTING, make_ready

__all__ = ["PointCount", "PointRunner", "compile_for", "run_in_process"]

POLL_INTERVAL_S: Final = 0.2


@dataclass(slots=True)
class _Worker:
    """A process, the parent's end of its pipe, and the number of the point that it runs."""

    place: int
    process: SpawnProcess
    line: "Connection[Any, Any]"
    under_way: int | None = field(default=None)


@dataclass(slots=True)
class PointCount:
    """The numbers of all points and of finished ones, for a bar and for an interrupted run.

    Args:
        num_points: points that are to be run.
        count_known: returns the number of points that were known before.
        num_done: finished points.
    """

    num_points: int
    count_known: Callable[[], int]
    num_done: int = 0

    @property
    def known(self) -> int:
        """Points whose figures are known."""
        return self.num_done + self.count_known()

    @property
    def total(self) -> int:
        """All points."""
        return self.num_points + self.count_known()

    def add(self, more: Sequence[PlanPoint]) -> Iterable[tuple[int, PlanPoint]]:
        """Count a point as done, and those that follow from it; return these with their places."""
        first, self.num_points, self.num_done = self.num_points, self.num_points + len(more), self.num_done + 1
        return enumerate(more, first)

    def __str__(self) -> str:
        return f"{self.known} of {self.total} points"

    def interrupted(self) -> InterruptedRunError:
        """Return the error of a run that was interrupted here."""
        return InterruptedRunError(
            f"interrupted after {self}; they are kept, and the same command continues from there"
        )


@dataclass(frozen=True, slots=True)
class PointRunner:
    """Runs points of one trace.

    Args:
        paths: the trace, or several as one.
        reading: how they are read.
        num_processes: points that run at once.
    """

    paths: Sequence[str]
    reading: SeveralTimedTracesOptions
    num_processes: int

    def run(
        self,
        points: Sequence[PlanPoint],
        keep: Callable[[int, PointFigures], Sequence[PlanPoint]],
        count_known: Callable[[], int],
    ) -> None:
        """Run points in any order, and the points that follow from them.

        Args:
            points: points to run.
            keep: called with the place and the figures of each point as soon as it is done; returns further points to
                run, whose places follow.
            count_known: returns the number of points that were known before, for the bar.

        Raises:
            ConfigurationError: a point cannot be run, or a process was ended from outside.
            InterruptedRunError: Ctrl-C.
        """
        prepare(partial(compile_for, points))
        left = deque(enumerate(points))
        count = PointCount(len(left), count_known)
        number = min(self.num_processes, len(left))
        try:
            with progress_bars() as progress, _workers(self.paths, self.reading, number) as (workers, shares):
                task = progress.add_task("plan", total=count.total, so_far="")
                for worker in workers:
                    _send_next(worker, left)
                while busy := [worker for worker in workers if worker.under_way is not None]:
                    for worker in _answering(busy):
                        place, figures = _answer(worker)
                        worker.under_way = None
                        left.extend(count.add(keep(place, figures)))
                        shares[worker.place] = 0.0
                    for worker in workers:
                        if worker.under_way is None:
                            _send_next(worker, left)
                    completed = count.known + sum(shares)
                    progress.update(task, completed=completed, total=count.total, so_far=str(count))
        except KeyboardInterrupt as error:
            raise count.interrupted() from error


def compile_for(points: Sequence[PlanPoint]) -> None:
    """Compile the loops that points use, so that their processes find them compiled."""
    for eviction in sorted({point.config.eviction for point in points}):
        compile_loops(eviction)
    if any(point.cluster is not None for point in points):
        make_ready(ROUTING)


def _send_next(worker: _Worker, left: deque[tuple[int, PlanPoint]]) -> None:
    """Send the next point to a worker, if there is one."""
    if left:
        place, point = left.popleft()
        worker.under_way = place
        worker.line.send((place, point))


def _answering(busy: Sequence[_Worker]) -> list[_Worker]:
    """Wait a moment for workers that have an answer, or have ended."""
    by_what = {each: worker for worker in busy for each in (worker.line, worker.process.sentinel)}
    ready = wait(list(by_what), timeout=POLL_INTERVAL_S)
    return list({worker.place: worker for each in ready for worker in [by_what[each]]}.values())  # type: ignore[index] # the given objects


def _answer(worker: _Worker) -> tuple[int, PointFigures]:
    """Receive the answer of a worker. Raises ConfigurationError."""
    try:
        answer = worker.line.recv()
    except (EOFError, OSError) as error:
        worker.process.join()
        raise ConfigurationError(
            f"a process that ran a point ended by itself (exit code {worker.process.exitcode}), as when memory runs "
            "out: run fewer at once (--jobs 1); the points that are done are kept"
        ) from error
    if isinstance(answer, str):
        raise ConfigurationError(answer)
    number = worker.under_way
    assert number is not None, "an answer without a point"
    return number, answer


@contextmanager
def _workers(
    paths: Sequence[str], reading: SeveralTimedTracesOptions, number: int
) -> Iterator[tuple[list[_Worker], Any]]:
    """Start workers, and end them in any case."""
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", max(1, number), lock=False)
    workers: list[_Worker] = []
    try:
        for place in range(number):
            parent_end, worker_end = context.Pipe()
            process = context.Process(target=_work, args=(worker_end, shares, place, paths, reading), daemon=True)
            process.start()
            worker_end.close()
            workers.append(_Worker(place, process, parent_end))
        yield workers, shares
    finally:
        for worker in workers:
            worker.line.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def _work(
    line: "Connection[Any, Any]",
    shares: Any,  # noqa: ANN401 - shared numbers
    place: int,
    paths: Sequence[str],
    reading: SeveralTimedTracesOptions,
) -> None:
    """Run the points received from the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            _, point = line.recv()
        except EOFError:
            return
        line.send(run_in_process(point, shares, place, paths, reading))


def run_in_process(
    point: PlanPoint,
    shares: Any,  # noqa: ANN401 - as above
    place: int,
    paths: Sequence[str],
    reading: SeveralTimedTracesOptions,
) -> PointFigures | str:
    """Run a point; return its figures, or else the error for the user, which is a text since not all errors are sent.

    Args:
        point: the point.
        shares: numbers of all processes; the share of the trace that was read is written to ``shares[place]``.
        place: the place of this process.
        paths: the trace; reading: how it is read.
    """
    try:
        return _run(point, shares, place, paths, reading)
    except (ConfigurationError, TraceError) as error:
        return str(error)
    except MemoryError:
        return "not enough memory: run fewer points at once (--jobs 1), or plan for less memory"


def _run(
    point: PlanPoint,
    shares: Any,  # noqa: ANN401 - as above
    place: int,
    paths: Sequence[str],
    reading: SeveralTimedTracesOptions,
) -> PointFigures:
    with TraceSources(paths, reading, reading.merging) as trace:
        num_bytes = trace.num_bytes or 1

        def show() -> None:
            shares[place] = min(1.0, trace.num_bytes_read / num_bytes)

        division = Division(reading.windows, lambda: trace.origin_s)
        return run_point(point, trace.requests(), show, division)
