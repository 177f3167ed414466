"""The deletes of a store: content that has left the index, and whose bytes count until its delete is completed.

A delete that fails is sent again after a pause. One that is overdue stays in flight until the driver reports it.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pagedkv.tiers.actions import Delete, Fault
from pagedkv.tiers.config import StoreConfig
from pagedkv.tiers.deadlines import SteadyClock
from pagedkv.tiers.room import Room

__all__ = ["Deletes"]


@dataclass(slots=True)
class Doomed:
    """Content that is to be deleted. ``action`` is 0 while the delete waits."""

    nbytes: int
    action: int = 0
    not_before_s: float = 0.0
    is_late: bool = False


class Deletes:
    """What is to be deleted, by key, and the deletes in flight.

    Args:
        config: most deletes in flight, their timeout, and the pause after a failed one.
        clock: the store's.
        room: counts the bytes until they are deleted.
    """

    def __init__(self, config: StoreConfig, clock: SteadyClock, room: Room) -> None:
        self._config = config
        self._clock = clock
        self._room = room
        self._doomed: dict[bytes, Doomed] = {}
        self._in_flight: dict[int, bytes] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        """Count what is to be deleted."""
        return len(self._doomed)

    def __contains__(self, key: bytes) -> bool:
        """Whether the content of a key is to be deleted."""
        return key in self._doomed

    @property
    def keys(self) -> Collection[bytes]:
        """The keys whose content is to be deleted."""
        return self._doomed.keys()

    @property
    def num_in_flight(self) -> int:
        """Deletes in flight."""
        return len(self._in_flight)

    @property
    def num_prompt(self) -> int:
        """Deletes in flight that are not overdue. O(deletes in flight)."""
        return sum(not self.is_late(action) for action in self._in_flight)

    def doom(self, key: bytes, nbytes: int) -> None:
        """Note that content, which counts already, is to be deleted."""
        assert key not in self._doomed, "content is to be deleted twice"
        self._doomed[key] = Doomed(nbytes)
        self.nbytes += nbytes

    def due(self) -> Iterator[bytes]:
        """Yield the keys whose deletes may begin now, while fewer than ``max_deletes`` are in flight. O(deletes)."""
        for key, doomed in self._doomed.items():
            if len(self._in_flight) >= self._config.max_deletes:
                return
            if not doomed.action and doomed.not_before_s <= self._clock.now_s:
                yield key

    def next_retry_s(self) -> float | None:
        """Return when the first delete that failed is sent again; None if none waits. O(deletes). Changes nothing."""
        times = (each.not_before_s for each in self._doomed.values() if each.not_before_s > self._clock.now_s)
        return min(times, default=None)

    def begin(self, action: int, key: bytes) -> Delete:
        """Begin a delete that is due."""
        self._doomed[key].action = action
        self._in_flight[action] = key
        return Delete(action, key, self._clock.now_s + self._config.write_timeout_s)

    def awaits(self, action: int) -> bool:
        """Whether a delete of this number is in flight."""
        return action in self._in_flight

    def key_of(self, action: int) -> bytes:
        """Return the key of a delete in flight."""
        return self._in_flight[action]

    def is_late(self, action: int) -> bool:
        """Whether a delete in flight is overdue."""
        return self._doomed[self._in_flight[action]].is_late

    def expire(self, action: int) -> None:
        """Note that an action is overdue, if it is a delete in flight."""
        if action in self._in_flight:
            self._doomed[self._in_flight[action]].is_late = True

    def end(self, action: int, fault: Fault | None) -> None:
        """End a delete. GONE counts as deleted; after any other fault the delete is sent again."""
        key = self._in_flight.pop(action)
        if fault in {None, Fault.GONE}:
            nbytes = self._doomed.pop(key).nbytes
            self.nbytes -= nbytes
            self._room.release(nbytes)
            return
        doomed = self._doomed[key]
        doomed.action, doomed.is_late = 0, False
        doomed.not_before_s = self._clock.now_s + self._config.breaker_pause_s

    def check(self) -> None:
        """Check the count of bytes. Raises AssertionError. O(deletes)."""
        doomed = sum(each.nbytes for each in self._doomed.values())
        assert doomed == self.nbytes, f"{doomed} bytes to be deleted, counted {self.nbytes}"
        begun = {key: doomed.action for key, doomed in self._doomed.items() if doomed.action}
        assert begun == {key: action for action, key in self._in_flight.items()}, "a delete is neither due nor begun"
