"""Points as tasks of Ray: on a cluster, or in local processes where there is none.

``RAY_ADDRESS`` names the cluster. Its machines need this version of pagedkv, and the trace under the same path. Without
it local processes are started, even beside another instance of Ray on this machine, which may have other packages.
Figures depend on neither processes nor machines, so they equal those of a run without Ray.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pagedkv.cli.plan_runs import POLL_INTERVAL_S, PointCount, compile_for, run_in_process
from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.trace_options import SeveralTimedTracesOptions
from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.simulation.planning import PlanPoint, PointFigures

with needing("cluster", "--ray"):
    import ray
ADDRESS: Final = "RAY_ADDRESS"


@dataclass(frozen=True, slots=True)
class RayRunner:
    """Runs points of one trace, like :class:`~pagedkv.cli.plan_runs.PointRunner`.

    Args:
        paths: the trace, or several as one.
        reading: how they are read.
        num_processes: points that run at once, where there is no cluster.
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
        """Run points in any order, and the points that follow from them; arguments and errors as without Ray.

        Raises:
            ConfigurationError: a point cannot be run, or its process ended from outside more often than Ray tries.
            InterruptedRunError: Ctrl-C.
        """
        prepare(partial(compile_for, points))
        paths = [str(Path(path).absolute()) for path in self.paths]
        count = PointCount(len(points), count_known)
        try:
            with _connected(self.num_processes), progress_bars() as progress:
                bar = progress.add_task("plan", total=count.total, so_far="")
                task: Any = ray.remote(_run_task)  # Ray has types for plain arguments of few functions
                under_way = {task.remote(point, paths, self.reading): place for place, point in enumerate(points)}
                while under_way:
                    done, _ = ray.wait(list(under_way), timeout=POLL_INTERVAL_S)
                    for each in done:
                        for place, point in count.add(keep(under_way.pop(each), _answer(each))):
                            under_way[task.remote(point, paths, self.reading)] = place
                    progress.update(bar, completed=count.known, total=count.total, so_far=str(count))
        except KeyboardInterrupt as error:
            raise count.interrupted() from error


def _run_task(point: PlanPoint, paths: Sequence[str], reading: SeveralTimedTracesOptions) -> PointFigures | str:
    return run_in_process(point, [0.0], 0, paths, reading)


def _answer(task: Any) -> PointFigures:  # noqa: ANN401 - a reference of Ray
    """Receive the answer of a task. Raises ConfigurationError."""
    try:
        answer: PointFigures | str = ray.get(task)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigurationError(
            f"a task that ran a point failed; the points that are done are kept: {reason:.300}"
        ) from error
    if isinstance(answer, str):
        raise ConfigurationError(answer)
    return answer


@contextmanager
def _connected(num_processes: int) -> Iterator[None]:
    """Connect to the cluster, or start one of local processes; an existing connection is used, and left open."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if ADDRESS in os.environ:
        ray.init(address=os.environ[ADDRESS], **quiet)
    else:
        ray.init(address="local", num_cpus=num_processes, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
