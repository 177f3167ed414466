"""SentBatches: the latest batches of a publisher, kept to be sent again."""

from collections import deque
from typing import final

from pagedkv.wire.frames import Message

__all__ = ["SentBatches"]


@final
class SentBatches:
    """A ring of batches.

    Args:
        most: most batches that are kept; older ones are dropped.
    """

    def __init__(self, most: int) -> None:
        self._messages: deque[Message] = deque(maxlen=most)

    def append(self, message: Message) -> None:
        """Keep a batch. Its number must be above those before."""
        self._messages.append(message)

    def since(self, first: int) -> list[Message]:
        """Return the kept batches from a number on. O(kept batches)."""
        return [message for message in self._messages if message.number >= first]
