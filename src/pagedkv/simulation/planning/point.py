"""run_point(): serves one setting with the production space and scheduler, by arrivals in open or closed loop.

Open loop: requests arrive by the trace's clock, accelerated by the load; a slow server falls behind. Closed loop: turns
wait for the answers before them (:mod:`pagedkv.simulation.closed_loop`). Figures are equal in every process.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request
from pagedkv.simulation.closed_loop import ClosedLoop, serve_closed
from pagedkv.simulation.cluster import ClusterSetting, VirtualCluster
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import RequestLog
from pagedkv.simulation.planning.figures import Bounds, ClusterSummary, Division, PointFigures, figures_of, parts_of
from pagedkv.simulation.planning.resampling import resampled
from pagedkv.simulation.virtual_clock import VirtualClock
from pagedkv.space import BlockSpace


def serve_open(clock: VirtualClock, requests: Iterable[Request], show: Callable[[], None]) -> None:
    """Serve requests as they arrive; ``show`` is called after each arrival."""
    for request in requests:
        clock.offer(request)
        show()
    clock.finish()


OPEN: Final = None
UNDIVIDED: Final = Division()


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One setting under one load.

    Args:
        config: the pools and the rules; its load is the offered one.
        costs: duration of steps.
        bounds: bounds of good answers.
        loop: think times of a closed loop; None: requests arrive as recorded.
        cluster: replicas, each of this configuration, and their router; None: one server.
        resample: seed of other arrivals like those of the trace (:func:`resampled`); None: those of the trace.

    Raises:
        ConfigurationError: a closed loop of several replicas.
    """

    config: ServingConfig
    costs: CostModel
    bounds: Bounds = Bounds()  # noqa: RUF009 - a value: frozen
    loop: ClosedLoop | None = OPEN
    cluster: ClusterSetting | None = None
    resample: int | None = None

    def __post_init__(self) -> None:
        if self.cluster is not None and self.loop is not None:
            raise ConfigurationError("a closed loop has one server: leave out `closed_loop`, or `replicas`")

    def as_dict(self) -> dict[str, object]:
        """Return everything that determines the figures, for JSON and for a digest."""
        return {
            "config": self.config.as_dict(),
            "groups": [repr(group) for group in self.config.group_specs],
            "costs": self.costs.as_dict(),
            "bounds": self.bounds.as_dict(),
            "answer_tokens_per_s": None if self.loop is None else self.loop.answer_tokens_per_s,
            **({} if self.cluster is None else {"cluster": self.cluster.as_dict()}),
            **({} if self.resample is None else {"resample": self.resample}),
        }


def run_point(
    point: PlanPoint,
    requests: Iterable[Request],
    show: Callable[[], None] = lambda: None,
    division: Division = UNDIVIDED,
) -> PointFigures:
    """Serve a trace under one setting.

    Args:
        point: the setting.
        requests: the trace, in order of arrival.
        show: called after each arrival; its exception ends the run.
        division: windows of recorded time, for figures by window.

    Raises:
        ConfigurationError: the requests of a closed loop or of a resample do not fit in memory.
        TraceError: an arrival is earlier than the previous one.
    """
    if point.resample is not None:
        requests = resampled(requests, point.resample)
    if point.cluster is not None:
        return _run_cluster(point, point.cluster, requests, show, division)
    config, log = point.config, RequestLog(point.config.scheduling_config(), records_ended=point.loop is not None)
    space = BlockSpace(config.space_config(is_watched=False))
    if point.loop is None:
        clock = VirtualClock(config, point.costs, space, log)
        serve_open(clock, requests, show)
    else:
        clock = VirtualClock(config, point.costs, space, log, uses_queue_file=False)
        serve_closed(clock, log.take_ended, requests, loop=point.loop, load=config.load, show=show)
    return figures_of(log, point.bounds, clock.peak_live, parts_of(log, point.bounds, division, config.load))


def _run_cluster(
    point: PlanPoint,
    setting: ClusterSetting,
    requests: Iterable[Request],
    show: Callable[[], None],
    division: Division,
) -> PointFigures:
    cluster = VirtualCluster(
        point.config,
        point.costs,
        setting.num_replicas,
        routing=setting.routing,
        rules=setting.rules,
        network=setting.network,
    )
    figures = cluster.run(requests, show)
    parts = parts_of(cluster.log, point.bounds, division, point.config.load)
    return figures_of(cluster.log, point.bounds, cluster.peak_live, parts, ClusterSummary.of(figures))
