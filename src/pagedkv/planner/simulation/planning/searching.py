"""LoadSearch: the highest load that a setting holds, by bisection on the same requests.

Loads lie on a grid of eighths of a doubling, three digits each, so that settings are tried under the same ones and a
load that is typed is the one that was searched. From the recorded traffic the search doubles, or halves, until one load
holds and one does not, then halves the number of steps between the two. That a load holds beside which a higher one was
found to hold is assumed, as in any bisection: hits depend on the load, so it need not be so.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pagedkv.planner.simulation.planning.steadiness import FAILS, HOLDS, TOO_SHORT

__all__ = ["HIGHEST_LOAD", "LoadLimit", "LoadSearch", "grid_load", "limit_of"]

STEPS_A_DOUBLING: Final = 8
HIGHEST: Final = 9 * STEPS_A_DOUBLING
LOWEST: Final = -6 * STEPS_A_DOUBLING
HIGHEST_LOAD: Final = 1000.0
"""Higher ones are refused: a trace of hours comes within seconds."""


def grid_load(step: int) -> float:
    """Give a load of the grid.

    >>> [grid_load(step) for step in (-8, 0, 1, 8)]
    [0.5, 1.0, 1.09, 2.0]
    """
    return float(f"{2 ** (step / STEPS_A_DOUBLING):.3g}")


@dataclass(frozen=True, slots=True)
class LoadLimit:
    """How much a setting takes, between two loads.

    Args:
        held: the highest load that holds; None: none did.
        ended: the lowest load tried above it that does not, or that the trace is too short for; None: none was tried.
        is_told: whether ``ended`` was found not to hold, and not only too much for a short trace.
    """

    held: float | None
    ended: float | None
    is_told: bool

    def as_dict(self) -> dict[str, float | bool | None]:
        """Lay out for JSON."""
        return {"held": self.held, "ended": self.ended, "is_told": self.is_told}


def limit_of(verdicts: Iterable[tuple[float, str]]) -> LoadLimit:
    """Sum the runs of a setting up: by load, each with its verdict.

    A load that holds above one that fails is not counted: what is told holds up to there.
    """
    by_load = dict(sorted(verdicts))
    failed = min((load for load, verdict in by_load.items() if verdict == FAILS), default=float("inf"))
    held = max((load for load, verdict in by_load.items() if verdict == HOLDS and load < failed), default=None)
    above = [load for load, verdict in by_load.items() if verdict != HOLDS and (held is None or load > held)]
    ended = min(above, default=None)
    return LoadLimit(held, ended, ended is not None and by_load[ended] == FAILS)


@dataclass(slots=True)
class LoadSearch:
    """A search under way. Which loads it asks for follows from the verdicts alone.

    >>> search = LoadSearch()
    >>> asked = []
    >>> while (load := search.next_load()) is not None:
    ...     asked.append(load)
    ...     search.tell("holds" if load < 1.6 else "fails")
    >>> asked
    [1.0, 2.0, 1.41, 1.68, 1.54]
    """

    _held: int | None = None
    _ended: int | None = None
    _asked: int | None = field(default=None)

    def next_load(self) -> float | None:
        """Give the load to be run next; None when the search is over."""
        step = self._next_step()
        self._asked = step
        return None if step is None else grid_load(step)

    def _next_step(self) -> int | None:
        if self._held is None and self._ended is None:
            return 0
        if self._held is None:
            assert self._ended is not None, "one of the two is known"
            return self._ended - STEPS_A_DOUBLING if self._ended > LOWEST else None
        if self._ended is None:
            return self._held + STEPS_A_DOUBLING if self._held < HIGHEST else None
        return (self._held + self._ended) // 2 if self._ended - self._held > 1 else None

    def tell(self, verdict: str) -> None:
        """Learn what became of the load asked for last.

        A trace that is too short for the first load is too short for a search: slower ones would make up time between
        requests that nobody took.
        """
        assert self._asked is not None, "nothing was asked for"
        if verdict == HOLDS:
            self._held = self._asked
        elif verdict == TOO_SHORT and self._held is None:
            self._held = self._ended = self._asked
        else:
            self._ended = self._asked
