"""Which loads each setting is run under: those that were typed, or those that a search for its limit asks for.

Each search goes by the verdicts on its own setting alone, so its points are the same in any number of processes. Points
that were run before are looked up, not run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pagedkv.cli.planning.axes import PlannedPoint
from pagedkv.cli.planning.store import PointStore
from pagedkv.planner.simulation.planning import LoadSearch, PlanPoint, PointFigures

__all__ = ["LoadRuns"]


@dataclass(slots=True)
class _Setting:
    """A setting, its search if there is one, and what was found out."""

    planned: PlannedPoint
    search: LoadSearch | None
    found: dict[float, tuple[PlannedPoint, PointFigures]] = field(default_factory=dict)


class LoadRuns:
    """The points of a plan as they come to be known.

    Args:
        planned: with loads as typed; or one for each setting, if loads are searched.
        store: figures of points that were run before, and where those of others go.
        is_searched: whether loads are searched.
        runs_again: whether what was run before is run again.
    """

    def __init__(
        self, planned: Sequence[PlannedPoint], store: PointStore, *, is_searched: bool, runs_again: bool
    ) -> None:
        self._store = store
        self._runs_again = runs_again
        self._is_searched = is_searched
        self._settings: dict[tuple[str, ...], _Setting] = {}
        self._given: list[tuple[_Setting, PlannedPoint]] = []
        self._planned = planned
        self.num_known = 0

    def first(self) -> list[PlanPoint]:
        """Give the points to be run to begin with."""
        points = []
        for each in self._planned:
            search = LoadSearch() if self._is_searched else None
            setting = self._settings.setdefault(tuple(each.choices.values()), _Setting(each, search))
            points += self._next(setting) if self._is_searched else self._unknown(setting, each)
        return points

    def keep(self, number: int, figures: PointFigures) -> list[PlanPoint]:
        """Take the figures of a point, by its place among all that were given; give those that come of it."""
        setting, planned = self._given[number]
        self._store.put(planned.point, figures)
        self._take(setting, planned, figures)
        return self._next(setting)

    def results(self) -> list[tuple[PlannedPoint, PointFigures]]:
        """Give what was found out: settings in the order of the axes, loads ascending where they were searched."""
        return [found for setting in self._settings.values() for found in self._in_order(setting)]

    def _in_order(self, setting: _Setting) -> Iterator[tuple[PlannedPoint, PointFigures]]:
        typed = [each.load for each in self._planned]
        loads = sorted(setting.found) if self._is_searched else dict.fromkeys(typed)
        return (setting.found[load] for load in loads)

    def _next(self, setting: _Setting) -> list[PlanPoint]:
        """Go on with a search until something has to be run."""
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
        self._given.append((setting, planned))
        return [planned.point]

    @staticmethod
    def _take(setting: _Setting, planned: PlannedPoint, figures: PointFigures) -> None:
        setting.found[planned.load] = planned, figures
        if setting.search is not None:
            setting.search.tell(figures.steadiness.verdict)
