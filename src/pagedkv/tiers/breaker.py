"""The circuit breaker of one body.

::

    CLOSED --- failures in a row ---> OPEN --- after a pause ---> PROBING --- one success ---> CLOSED
                                        ^                            |
                                        +------- one failure --------+     the pause grows each time

While it is open, no action is sent to the body. While it probes, one action at a time is sent.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BreakerState", "CircuitBreaker"]


class BreakerState(StrEnum):
    """States of a breaker: all actions are sent, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after failures in a row. It has no clock: times are arguments.

    Args:
        num_failures: number of failures in a row that opens it.
        pause_s: first pause; each failed probe doubles it.
        longest_pause_s: longest pause.
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
        """Whether no action is sent to the body."""
        return self.state is BreakerState.OPEN

    def note_success(self) -> None:
        """Record that an action succeeded."""
        self.failures_in_a_row = 0
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.CLOSED
            self.next_pause_s = 0.0

    def note_failure(self, now_s: float) -> bool:
        """Record that an action failed or was overdue; return whether the breaker opened because of it."""
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
        """Change from open to probing if the pause is over."""
        if self.state is BreakerState.OPEN and now_s >= self.opens_again_s:
            self.state = BreakerState.PROBING
