"""The time of a store: a clock that never goes back, and what is due when.

Loads, offers and actions in flight are numbered in one sequence, so a number identifies what is due. A deadline
stays until it is due, also if what it was for has ended by then.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count

__all__ = ["Deadlines", "SteadyClock"]


@dataclass(slots=True)
class SteadyClock:
    """Seconds that never decrease, from a caller's clock that may jump.

    A jump back counts as no time. Deadlines stay due, since time goes on from there. A jump forward counts as time:
    what waits is then late, which is a miss.
    """

    now_s: float = 0.0
    last_s: float | None = None

    def advance(self, now_s: float) -> float:
        """Set the caller's time; return the steady one."""
        if self.last_s is not None and now_s > self.last_s:
            self.now_s += now_s - self.last_s
        self.last_s = now_s
        return self.now_s


@dataclass(slots=True)
class Deadlines:
    """Numbers, and when each is due by the steady clock."""

    _heap: list[tuple[float, int]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def take_number(self) -> int:
        """Return a number that nothing else has; from 1 on."""
        return next(self._numbers)

    def add(self, number: int, due_s: float) -> None:
        """Note when a number is due. O(log deadlines)."""
        heapq.heappush(self._heap, (due_s, number))

    def pop_overdue(self, now_s: float) -> int | None:
        """Remove the earliest deadline that is due, and return its number; None if none is. O(log deadlines)."""
        if not self._heap or self._heap[0][0] > now_s:
            return None
        return heapq.heappop(self._heap)[1]

    @property
    def first_s(self) -> float | None:
        """The earliest deadline; None if there is none."""
        return self._heap[0][0] if self._heap else None
