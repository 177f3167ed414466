"""When a store acts: a clock that never goes back, what is due when, and the circuit breaker of its body.

Loads, offers and actions in flight are numbered in one sequence, so a number identifies what is due. A deadline
stays until it is due, also if what it was for has ended by then. The breaker has no clock::

    CLOSED --- failures ---> OPEN --- after a pause ---> PROBING --- one success ---> CLOSED
                              ^                             |
                              +-------- one failure --------+     the pause grows each time

The breaker opens when different keys have failed one after the other without a success between them. It also opens when
reads that hang take more than half of the time of the latest reads, whatever succeeds between them: where a third of
the reads hang for two seconds, requests wait for those. While it is open, no action is sent to the body. While it
probes, one read or write at a time is sent.
"""

import heapq
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Final


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


KEEPS: Final = 0.99
"""Weight of the past at each new read: the latest hundred count."""
MOST_LOST: Final = 0.5
"""Share of the time of reads."""


class BreakerState(StrEnum):
    """States of a breaker: all actions are sent, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after failures. It has no clock: times are arguments.

    Args:
        num_failures: number of keys that fail in a row, or of reads that hang among the latest, that opens it.
        pause_s: first pause; each failed probe doubles it.
        longest_pause_s: longest pause.

    Attributes:
        failed: what has failed since the last success. One entry that cannot be read is one failure, however often it
            is asked for.
        num_lost, lost_s, read_s: reads that hung among the latest, their seconds, and those of all; older ones count
            less.
    """

    num_failures: int
    pause_s: float
    longest_pause_s: float
    state: BreakerState = BreakerState.CLOSED
    failed: set[tuple[str, bytes]] = field(default_factory=set)
    num_lost: float = 0.0
    lost_s: float = 0.0
    read_s: float = 0.0
    next_pause_s: float = 0.0
    opens_again_s: float = 0.0
    times_opened: int = 0

    @property
    def is_open(self) -> bool:
        """Whether no action is sent to the body."""
        return self.state is BreakerState.OPEN

    @property
    def loses_time(self) -> bool:
        """Whether most of the time of the latest reads was lost."""
        return self.num_lost >= self.num_failures and self.lost_s > MOST_LOST * self.read_s

    def _note_read(self, seconds: float, *, is_lost: bool) -> None:
        self.num_lost = KEEPS * self.num_lost + is_lost
        self.lost_s = KEEPS * self.lost_s + seconds * is_lost
        self.read_s = KEEPS * self.read_s + seconds

    def note_success(self, read_s: float | None = None) -> None:
        """Record that the body did a read, in so many seconds, or a write.

        While time is being lost, the next pause grows all the same.
        """
        if read_s is not None:
            self._note_read(read_s, is_lost=False)
        self.failed.clear()
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.CLOSED
            if not self.loses_time:
                self.next_pause_s = 0.0

    def note_failure(self, what: tuple[str, bytes], now_s: float, read_s: float | None = None) -> bool:
        """Record that an action failed or was overdue; return whether the breaker opened because of it.

        Args:
            what: the kind of the action, and its key.
            now_s: time.
            read_s: seconds of a read that hangs.
        """
        self.failed.add(what)
        is_due = len(self.failed) >= self.num_failures
        if read_s is not None:
            self._note_read(read_s, is_lost=True)
            is_due = is_due or self.loses_time
        is_due = is_due and self.state is BreakerState.CLOSED
        if not is_due and self.state is not BreakerState.PROBING:
            return False
        self.next_pause_s = min(self.longest_pause_s, max(self.pause_s, 2 * self.next_pause_s))
        self.opens_again_s = now_s + self.next_pause_s
        self.state = BreakerState.OPEN
        self.times_opened += 1
        return True

    def advance(self, now_s: float) -> None:
        """Change from open to probing if the pause is over."""
        if self.state is BreakerState.OPEN and now_s >= self.opens_again_s:
            self.state = BreakerState.PROBING
