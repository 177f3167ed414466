"""The points of a plan that are run: loads of each setting, comparisons with clusters, figures that were stored before.

Figures are kept in one file each, written whole or not at all, named by a digest of the version, the trace's bytes, how
it is read, and the point. So a plan with an equal point uses the file, and no other plan does. An unreadable file
counts as missing.

The loads of a setting are the typed ones, or those of a search for its limit. Each search depends on the verdicts on
its own setting alone, so its points are equal for any number of processes. The headline's setting is searched again
with longer and shorter seconds and with resampled arrivals, for its interval.

A cluster is compared with the same requests routed in turn, and with one pool with the memory of all replicas: its hits
lie between these two. Each setting with replicas is run once more in both ways, at the load of its headline: the
highest that it holds, else the lowest that was run. Only the hits of one pool are comparable: it has the memory of all
replicas and the speed of one, so its load is divided by the number of replicas.

Points run in separate processes, a given number at once, with one progress bar. Workers run until no point is left, so
that each loads the compiled loops once; all loops are on disk before the first worker starts. Workers ignore Ctrl-C;
the parent process handles it, keeps finished points and ends the workers.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import msgspec

from pagedkv import __version__
from pagedkv.cli.output_files import atomic_file
from pagedkv.cli.plan_axes import PlannedPoint
from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.trace_options import SeveralTimedTracesOptions, TraceSources
from pagedkv.errors import ConfigurationError, InterruptedRunError, OutputError, TraceError
from pagedkv.planner.traces.lines import files_of
from pagedkv.simulation import ServingConfig, compile_loops
from pagedkv.simulation.planning import LoadSearch, PlanPoint, PointFigures, run_point
from pagedkv.simulation.planning.figures import Division
from pagedkv.simulation.planning.interval import points_again, search_again
from pagedkv.simulation.planning.searching import limit_of
from pagedkv.warming import ROUTING, make_ready

FORMAT: Final = 4
"""Version of the files and of the meaning of figures; it grows when either changes."""


def default_folder() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv-plans"


def digest_of_files(paths: Sequence[str]) -> str:
    """Compute a digest of files, in their order.

    Raises:
        OutputError: a path is not an ordinary file, which every point can read again.
    """
    digests = [_digest_of_file(file) for path in paths for file in files_of(path)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest_of_file(path: str | Path) -> str:
    file = Path(path)
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise OutputError(f"{path}: a plan reads the trace once for each point: name a file, not a pipe")
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise OutputError(f"{path}: cannot be opened: {error.strerror}") from error


class PointStore:
    """A folder of figures.

    Args:
        folder: created if missing.
        trace_digest: digest of the trace.
        reading: how the trace is read, as text.

    Raises:
        OutputError: the folder cannot be made.
    """

    def __init__(self, folder: Path, trace_digest: str, reading: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder}: cannot be made: {error.strerror or error}. Name another folder for results (--results)"
            ) from error
        self._folder = folder
        self._trace = {"version": __version__, "format": FORMAT, "trace": trace_digest, "reading": reading}

    def get(self, point: PlanPoint) -> PointFigures | None:
        """Return the figures of a point, if it was run before."""
        try:
            values = json.loads(self._path(point).read_bytes())
            return msgspec.convert(values["figures"], PointFigures)
        except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
            return None

    def put(self, point: PlanPoint, figures: PointFigures) -> None:
        """Store the figures of a point. Raises OutputError."""
        values: Mapping[str, object] = {**self._trace, "point": point.as_dict(), "figures": figures.as_dict()}
        with atomic_file(self._path(point)) as file:
            file.write(json.dumps(values).encode() + b"\n")

    def _path(self, point: PlanPoint) -> Path:
        key = json.dumps({**self._trace, "point": point.as_dict()}, sort_keys=True)
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


@dataclass(slots=True)
class _Setting:
    """A setting, its search if there is one, and its results."""

    planned: PlannedPoint
    search: LoadSearch | None
    found: dict[float, tuple[PlannedPoint, PointFigures]] = field(default_factory=dict)


class LoadRuns:
    """The points of a plan and their figures so far.

    Args:
        planned: points with loads as typed; or one for each setting, if loads are searched.
        store: figures of points that were run before; it also stores new ones.
        search: begins the search of a setting, by its point; None: loads are typed.
        runs_again: whether points that were run before are run again.
    """

    def __init__(
        self,
        planned: Sequence[PlannedPoint],
        store: PointStore,
        *,
        search: Callable[[PlannedPoint], LoadSearch] | None,
        runs_again: bool,
    ) -> None:
        self._search = search
        self._store = store
        self._runs_again = runs_again
        self._settings: dict[tuple[str, ...], _Setting] = {}
        self._returned: list[tuple[_Setting, PlannedPoint]] = []
        self._planned = planned
        self.num_known = 0

    def first(self) -> list[PlanPoint]:
        """Return the first points to run."""
        points = []
        for each in self._planned:
            search = None if self._search is None else self._search(each)
            setting = self._settings.setdefault(tuple(each.choices.values()), _Setting(each, search))
            points += self._unknown(setting, each) if search is None else self._next(setting)
        return points

    def keep(self, number: int, figures: PointFigures) -> list[PlanPoint]:
        """Store the figures of a point, by its place among all returned points; return the points to run next."""
        setting, planned = self._returned[number]
        self._store.put(planned.point, figures)
        self._take(setting, planned, figures)
        return self._next(setting)

    def results(self) -> list[tuple[PlannedPoint, PointFigures]]:
        """Return the results: settings in the order of the axes, searched loads ascending."""
        return [found for setting in self._settings.values() for found in self._in_order(setting)]

    def _in_order(self, setting: _Setting) -> Iterator[tuple[PlannedPoint, PointFigures]]:
        typed = [each.load for each in self._planned]
        loads = dict.fromkeys(typed) if setting.search is None else sorted(setting.found)
        return (setting.found[load] for load in loads)

    def _next(self, setting: _Setting) -> list[PlanPoint]:
        """Continue a search until a point must be run."""
        while setting.search is not None and (load := setting.search.next_load()) is not None:
            config = replace(setting.planned.point.config, load=load)
            planned = replace(setting.planned, load=load, point=replace(setting.planned.point, config=config))
            points = self._unknown(setting, planned)
            if points:
                return points
        return []

    def _unknown(self, setting: _Setting, planned: PlannedPoint) -> list[PlanPoint]:
        figures = None if self._runs_again else self._store.get(planned.point)
        if figures is not None:
            self.num_known += 1
            self._take(setting, planned, figures)
            return []
        self._returned.append((setting, planned))
        return [planned.point]

    @staticmethod
    def _take(setting: _Setting, planned: PlannedPoint, figures: PointFigures) -> None:
        setting.found[planned.load] = planned, figures
        if setting.search is not None:
            setting.search.record(figures.steadiness.verdict)


def again(
    planned: PlannedPoint, error: float | None, num_resamples: int, store: PointStore, *, runs_again: bool
) -> LoadRuns:
    """Return further searches for the load that a setting holds, named by their only choice.

    Args:
        planned: the setting at the highest load that it holds, where the searches begin.
        error, num_resamples: as of :func:`points_again`.
        store, runs_again: as of :class:`LoadRuns`.
    """
    points = points_again(planned.point, error, num_resamples)
    searched = [replace(planned, choices={"again": name}, point=each) for name, each in points.items()]
    return LoadRuns(
        searched, store, search=lambda each: search_again(each.choices["again"], each.load), runs_again=runs_again
    )


ONE_POOL: Final = "one pool"
IN_TURN: Final = "round-robin"
Key = tuple[str, ...]


@dataclass(slots=True)
class BesideRuns:
    """The points for comparison with a plan's clusters.

    Args:
        found: all points of the plan.
        store: figures of points that were run before; it also stores new ones.
        runs_again: whether points that were run before are run again.

    Attributes:
        num_known: points that were run before.
    """

    found: Sequence[tuple[PlannedPoint, PointFigures]]
    store: PointStore
    runs_again: bool
    num_known: int = 0
    _figures: dict[tuple[Key, str], PointFigures] = field(default_factory=dict)
    _returned: list[tuple[Key, str, PlanPoint]] = field(default_factory=list)

    def first(self) -> list[PlanPoint]:
        """Return the points to run."""
        known = {str(planned.point.as_dict()): figures for planned, figures in self.found}
        for key, name, point in self._compared():
            figures = known.get(str(point.as_dict())) or (None if self.runs_again else self.store.get(point))
            if figures is None:
                self._returned.append((key, name, point))
            else:
                self.num_known += 1
                self._figures[key, name] = figures
        return [point for _, _, point in self._returned]

    def keep(self, number: int, figures: PointFigures) -> list[PlanPoint]:
        """Store the figures of a point, by its place among all returned points; no further points follow."""
        key, name, point = self._returned[number]
        self.store.put(point, figures)
        self._figures[key, name] = figures
        return []

    def of(self, choices: Mapping[str, str]) -> dict[str, PointFigures]:
        """Return the figures for comparison with a setting, by name; none for one server."""
        key = tuple(choices.values())
        return {name: self._figures[key, name] for name in (IN_TURN, ONE_POOL) if (key, name) in self._figures}

    def _compared(self) -> Iterator[tuple[Key, str, PlanPoint]]:
        by_setting: dict[Key, list[tuple[PlannedPoint, PointFigures]]] = {}
        for planned, figures in self.found:
            by_setting.setdefault(tuple(planned.choices.values()), []).append((planned, figures))
        for key, runs in by_setting.items():
            held = limit_of((planned.load, figures.steadiness.verdict) for planned, figures in runs).held
            load = min(planned.load for planned, _ in runs) if held is None else held
            point = next(planned.point for planned, _ in runs if planned.load == load)
            if point.cluster is not None:
                yield key, IN_TURN, replace(point, cluster=replace(point.cluster, routing=IN_TURN))
                pooled = one_pool(point.config, point.cluster.num_replicas)
                yield key, ONE_POOL, replace(point, cluster=None, config=pooled)


def one_pool(config: ServingConfig, num_replicas: int) -> ServingConfig:
    """Configure one server with the memory of ``num_replicas``; its load is divided by their number."""

    def times(count: int) -> int:
        return (count - 1) * num_replicas + 1  # there is one null block

    blocks = config.num_blocks
    return replace(
        config,
        num_blocks=times(blocks) if isinstance(blocks, int) else {pool: times(each) for pool, each in blocks.items()},
        max_sequences=config.max_sequences * num_replicas,
        load=config.load / num_replicas,
        tiers=tuple(replace(tier, nbytes=tier.nbytes * num_replicas) for tier in config.tiers),
    )


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
