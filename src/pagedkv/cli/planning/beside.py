"""Runs for comparison with a cluster: the same requests routed in turn, and one pool with the memory of all replicas.

A cluster's hits lie between these two. Each setting with replicas is run once more in both ways, at the load of its
headline: the highest that it holds, else the lowest that was run. Only the hits of one pool are comparable: it has the
memory of all replicas and the speed of one, so its load is divided by the number of replicas.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pagedkv.cli.planning.axes import PlannedPoint
from pagedkv.cli.planning.store import PointStore
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.planning import PlanPoint, PointFigures
from pagedkv.simulation.planning.searching import limit_of

__all__ = ["IN_TURN", "ONE_POOL", "BesideRuns"]

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
