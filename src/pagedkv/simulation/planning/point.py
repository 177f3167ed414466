"""run_point(): serves one setting with the production space and scheduler. Figures are equal in every process."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request
from pagedkv.simulation.cluster import ClusterSetting, VirtualCluster
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.planning.arrivals import ClosedLoop, serve_closed, serve_open
from pagedkv.simulation.planning.figures import Bounds, ClusterSummary, Division, PointFigures, figures_of, parts_of
from pagedkv.simulation.request_log import RequestLog
from pagedkv.simulation.virtual_clock import VirtualClock
from pagedkv.space import BlockSpace

__all__ = ["PlanPoint", "run_point"]

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

    Raises:
        ConfigurationError: a closed loop of several replicas.
    """

    config: ServingConfig
    costs: CostModel
    bounds: Bounds = Bounds()  # noqa: RUF009 - a value: frozen
    loop: ClosedLoop | None = OPEN
    cluster: ClusterSetting | None = None

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
        ConfigurationError: the closed loop does not fit in memory.
        TraceError: an arrival is earlier than the previous one.
    """
    if point.cluster is not None:
        return _run_cluster(point, point.cluster, requests, show, division)
    config, log = point.config, RequestLog(point.config.scheduling_config(), records_ended=point.loop is not None)
    space = BlockSpace(config.space_config(is_watched=False))
    if point.loop is None:
        clock = VirtualClock(config, point.costs, space, log)
        serve_open(clock, requests, show)
    else:
        clock = VirtualClock(replace(config, load=1.0), point.costs, space, log, uses_queue_file=False)
        serve_closed(clock, log, requests, loop=point.loop, load=config.load, show=show)
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
