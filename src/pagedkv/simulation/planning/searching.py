"""LoadSearch: the highest load that a setting holds.

It is found by bisection on the same requests. Loads lie on a grid of eighths of a
doubling, three digits each, so that all settings are tried under equal loads, and a load that a user types equals the
searched one. From the recorded traffic the search doubles, or halves, until one load holds and one does not; then it
halves the number of grid steps between the two. As in any bisection, every load below one that holds is assumed to
hold. That need not be so, since hits depend on the load.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pagedkv.planner.results import Result
from pagedkv.simulation.planning.figures import FAILS, HOLDS, TOO_SHORT

STEPS_A_DOUBLING: Final = 8
HIGHEST: Final = 9 * STEPS_A_DOUBLING
LOWEST: Final = -6 * STEPS_A_DOUBLING
HIGHEST_LOAD: Final = 1000.0
"""Higher loads are refused: at this one a trace of hours arrives within seconds."""


def grid_load(step: float) -> float:
    """Return a load of the grid, or between two of it, with a digit more.

    >>> [grid_load(step) for step in (-8, 0, 0.5, 1, 8)]
    [0.5, 1.0, 1.044, 1.09, 2.0]
    """
    num_digits = 3 if step == round(step) else 4
    return float(f"{2 ** (step / STEPS_A_DOUBLING):.{num_digits}g}")


@dataclass(frozen=True, slots=True)
class LoadLimit(Result):
    """The load limit of a setting, between two loads.

    Args:
        held: the highest load that holds; None: none held.
        ended: the lowest load tried above it that fails, or for which the trace is too short; None: none was tried.
        is_decided: whether ``ended`` failed; False: the trace was too short to decide.
    """

    held: float | None
    ended: float | None
    is_decided: bool


def limit_of(verdicts: Iterable[tuple[float, str]]) -> LoadLimit:
    """Combine the runs of a setting, as pairs of load and verdict, into its limit.

    A load that holds above one that fails is not counted.
    """
    by_load = dict(sorted(verdicts))
    failed = min((load for load, verdict in by_load.items() if verdict == FAILS), default=float("inf"))
    held = max((load for load, verdict in by_load.items() if verdict == HOLDS and load < failed), default=None)
    above = [load for load, verdict in by_load.items() if verdict != HOLDS and (held is None or load > held)]
    ended = min(above, default=None)
    return LoadLimit(held, ended, ended is not None and by_load[ended] == FAILS)


@dataclass(slots=True)
class LoadSearch:
    """A search under way. The verdicts alone determine its loads.

    Args:
        start: the first load.
        stride: how far the second load is from it, in eighths of a doubling.
        finest: where the search ends, likewise; the stride is a multiple of it.

    >>> search = LoadSearch()
    >>> loads = []
    >>> while (load := search.next_load()) is not None:
    ...     loads.append(load)
    ...     search.record("holds" if load < 1.6 else "fails")
    >>> loads
    [1.0, 2.0, 1.41, 1.68, 1.54]
    """

    start: float = 1.0
    stride: float = STEPS_A_DOUBLING
    finest: float = 1.0
    _held: float | None = None
    _ended: float | None = None
    _last: float | None = field(default=None)

    def next_load(self) -> float | None:
        """Return the load to run next; None when the search is over."""
        step = self._next_step()
        self._last = step
        return None if step is None else grid_load(step)

    def _next_step(self) -> float | None:
        if self._held is None and self._ended is None:
            return self.finest * round(STEPS_A_DOUBLING * math.log2(self.start) / self.finest)
        if self._held is None:
            assert self._ended is not None, "one of the two is known"
            return self._ended - self.stride if self._ended > LOWEST else None
        if self._ended is None:
            return self._held + self.stride if self._held < HIGHEST else None
        num_steps = (self._ended - self._held) / self.finest
        return self._held + self.finest * (num_steps // 2) if num_steps > 1 else None

    def record(self, verdict: str) -> None:
        """Record the verdict of the last load.

        A trace that is too short for the first load is too short for a search: slower loads would add waits between
        requests that were not recorded.
        """
        assert self._last is not None, "next_load() returned no load"
        if verdict == HOLDS:
            self._held = self._last
        elif verdict == TOO_SHORT and self._held is None:
            self._held = self._ended = self._last
        else:
            self._ended = self._last
