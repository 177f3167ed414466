"""Numbers of messages: a message's number and time determine its place.

A publisher numbers its messages from 0, and again from 0 after a restart. Where messages have the name of their
process (a lifetime), it distinguishes two processes. Else only times do: a message that is sent again has its old time;
a message of a new process has a later one.
"""

from enum import Enum, auto

__all__ = ["MessageNumbers", "Place"]


class Place(Enum):
    """The place of a message relative to earlier ones."""

    NEXT = auto()
    SEEN = auto()
    """Received before, and requested again."""
    BEHIND_GAP = auto()
    RESTARTED = auto()
    """A lower number with a later time: a new process, whose cache was empty at first."""


class MessageNumbers:
    """Follows the numbers of one publisher."""

    def __init__(self) -> None:
        self.expected = 0
        """Number of the next message."""
        self._latest_s = float("-inf")
        self.lifetime: str | None = None
        """Name of the followed process; None before the first message, and where messages have none."""

    @property
    def has_begun(self) -> bool:
        """Whether any message was taken."""
        return self._latest_s > float("-inf")

    def place(self, number: int, sent_s: float, lifetime: str | None = None) -> Place:
        """Return the place of a message. Changes nothing."""
        is_another = lifetime is not None and self.lifetime not in {None, lifetime}
        if is_another and sent_s >= self._latest_s:
            return Place.RESTARTED
        if number >= self.expected and not is_another:
            return Place.NEXT if number == self.expected else Place.BEHIND_GAP
        return Place.SEEN if lifetime is not None or sent_s <= self._latest_s else Place.RESTARTED

    def is_past(self, sent_s: float) -> bool:
        """Return whether a time is before that of the last message taken. Changes nothing."""
        return sent_s < self._latest_s

    def take(self, number: int, sent_s: float, lifetime: str | None = None) -> None:
        """Continue after a message."""
        self.expected = number + 1
        self._latest_s = sent_s
        self.lifetime = lifetime

    def begin_anew(self) -> None:
        """Follow a new process."""
        self.lifetime = None
        self.expected = 0
