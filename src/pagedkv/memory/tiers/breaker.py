"""The circuit breaker of one body.

::

    CLOSED --- failures in a row ---> OPEN --- after a pause ---> PROBING --- one success ---> CLOSED
                                        ^                            |
                                        +------- one failure --------+     each time a longer pause

While it is open, nothing is sent to the body. While it probes, one action at a time is.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BreakerState", "CircuitBreaker"]


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after failures in a row; without a clock of its own.

    Args:
        num_failures: failures in a row that open it.
        pause_s: how long it stays open at first; twice as long after each failed probe.
        longest_pause_s: at most.
    """

    num_failures: int
    pause_s: float
    longest_pause_s: float
    state: BreakerState = BreakerState.CLOSED
    failures_in_a_row: int = 0
    next_pause_s: float = 0.0
    opens_again_s: float = 0.0
    times_opened: int = 0

    @property
    def is_open(self) -> bool:
        """Whether nothing is sent to the body."""
        return self.state is BreakerState.OPEN

    def note_success(self) -> None:
        """Record that the body answered."""
        self.failures_in_a_row = 0
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.CLOSED
            self.next_pause_s = 0.0

    def note_failure(self, now_s: float) -> bool:
        """Record that the body failed or was too slow; return whether the breaker opened by it."""
        self.failures_in_a_row += 1
        is_due = self.state is BreakerState.CLOSED and self.failures_in_a_row >= self.num_failures
        if not is_due and self.state is not BreakerState.PROBING:
            return False
        self.next_pause_s = min(self.longest_pause_s, max(self.pause_s, 2 * self.next_pause_s))
        self.opens_again_s = now_s + self.next_pause_s
        self.state = BreakerState.OPEN
        self.times_opened += 1
        return True

    def advance(self, now_s: float) -> None:
        """Begin to probe if the pause is over."""
        if self.state is BreakerState.OPEN and now_s >= self.opens_again_s:
            self.state = BreakerState.PROBING
