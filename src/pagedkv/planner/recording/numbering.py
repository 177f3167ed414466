"""Messages and their numbers: which one this is, told by its number and its time.

A publisher numbers its messages from 0, and begins anew when its process does. Nothing tells one process from another
but this: what was sent before comes with an old time, what a new process sends with a later one.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = ["Message", "MessageNumbers", "Place"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message, not yet understood: its number, what it carries, and what it is published under."""

    number: int
    payload: bytes
    topic: bytes = field(default=b"", compare=False)
    """Not of the message itself: one that is sent again may lack it."""


class Place(Enum):
    """Where a message stands among those before it."""

    NEXT = auto()
    SEEN = auto()
    """Asked for again, and there already."""
    BEHIND_GAP = auto()
    RESTARTED = auto()
    """A lower number with a later time: of a new process, whose cache began empty."""


class MessageNumbers:
    """Follows the numbers of one publisher."""

    def __init__(self) -> None:
        self.expected = 0
        """Number of the message that comes next."""
        self._latest_s = float("-inf")

    @property
    def has_begun(self) -> bool:
        """Whether any message was taken."""
        return self._latest_s > float("-inf")

    def place(self, number: int, sent_s: float) -> Place:
        """Tell where a message stands. Changes nothing."""
        if number >= self.expected:
            return Place.NEXT if number == self.expected else Place.BEHIND_GAP
        return Place.SEEN if sent_s <= self._latest_s else Place.RESTARTED

    def is_past(self, sent_s: float) -> bool:
        """Tell whether a time is before that of the last message taken. Changes nothing."""
        return sent_s < self._latest_s

    def take(self, number: int, sent_s: float) -> None:
        """Go on behind a message."""
        self.expected = number + 1
        self._latest_s = sent_s

    def begin_anew(self) -> None:
        """Follow a new process."""
        self.expected = 0
