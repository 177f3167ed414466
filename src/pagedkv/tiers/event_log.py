"""The events of a store that were not drained yet."""

from collections import deque
from typing import Final

import numpy as np

from pagedkv.tiers.actions import StoreEventKind, StoreEvents
from pagedkv.tiers.keys import KEY_NBYTES, ZERO_KEY

__all__ = ["StoreEventLog"]

NO_EVENTS: Final = StoreEvents(np.empty(0, np.int32), np.empty((0, KEY_NBYTES), np.uint8))


class StoreEventLog:
    """The latest events.

    Args:
        max_events: most events; older ones are lost. 0: no event is recorded.
    """

    def __init__(self, max_events: int) -> None:
        self._events: deque[tuple[StoreEventKind, bytes]] = deque(maxlen=max_events)
        self._has_gap = False

    def note(self, kind: StoreEventKind, key: bytes = ZERO_KEY) -> None:
        """Record an event."""
        self._has_gap |= len(self._events) == self._events.maxlen
        self._events.append((kind, key))

    def drain(self) -> StoreEvents:
        """Return the events since the last call and remove them; the first is a GAP if older ones were lost."""
        if not self._events:
            return NO_EVENTS
        events = list(self._events)
        if self._has_gap:
            events.insert(0, (StoreEventKind.GAP, ZERO_KEY))
        self._events.clear()
        self._has_gap = False
        kinds = np.array([int(kind) for kind, _ in events], np.int32)
        keys = np.frombuffer(b"".join(key for _, key in events), np.uint8).reshape(len(events), KEY_NBYTES)
        return StoreEvents(kinds, keys)
