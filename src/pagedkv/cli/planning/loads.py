"""The loads of each setting: the typed ones, or those of a search for its limit.

Each search depends on the verdicts on its own setting alone, so its points are equal for any number of processes.
Points that were run before are looked up, not run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pagedkv.cli.planning.axes import PlannedPoint
from pagedkv.cli.planning.store import PointStore
from pagedkv.simulation.planning import LoadSearch, PlanPoint, PointFigures

__all__ = ["LoadRuns"]


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
        is_searched: whether loads are searched.
        runs_again: whether points that were run before are run again.
    """

    def __init__(
        self, planned: Sequence[PlannedPoint], store: PointStore, *, is_searched: bool, runs_again: bool
    ) -> None:
        self._store = store
        self._runs_again = runs_again
        self._is_searched = is_searched
        self._settings: dict[tuple[str, ...], _Setting] = {}
        self._returned: list[tuple[_Setting, PlannedPoint]] = []
        self._planned = planned
        self.num_known = 0

    def first(self) -> list[PlanPoint]:
        """Return the first points to run."""
        points = []
        for each in self._planned:
            search = LoadSearch() if self._is_searched else None
            setting = self._settings.setdefault(tuple(each.choices.values()), _Setting(each, search))
            points += self._next(setting) if self._is_searched else self._unknown(setting, each)
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
        loads = sorted(setting.found) if self._is_searched else dict.fromkeys(typed)
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
