"""The entries of a store: index, bytes and events change together.

::

    take --> (being written) --> publish --> (can be loaded) --> evict | remove --> (to be deleted) --> bytes are free
                   |                                                                      ^
                   +--------------------> abandon ----------------------------------------+

A reference in the index holds an entry: it is not evicted, and its number names no other content.
"""

from typing import Final

import numpy as np

from pagedkv.memory.tiers.actions import StoreEventKind
from pagedkv.memory.tiers.config import StoreConfig
from pagedkv.memory.tiers.deadlines import SteadyClock
from pagedkv.memory.tiers.deletes import Deletes
from pagedkv.memory.tiers.event_log import StoreEventLog
from pagedkv.memory.tiers.index import NO_ENTRY, StoreIndex
from pagedkv.memory.tiers.room import Room

__all__ = ["LARGEST_ENTRY", "Entries"]

LARGEST_ENTRY: Final = 2**31 - 1


class Entries:
    """The entries of one store, with what is being written and deleted.

    Args:
        config: the caps, and the eviction policy.
        clock: the store's.
    """

    def __init__(self, config: StoreConfig, clock: SteadyClock) -> None:
        """Build an empty store's. O(max_entries)."""
        self.index = StoreIndex(config.max_entries, config.eviction)
        self.room = Room(config.cap_nbytes, config.floor_nbytes)
        self.deletes = Deletes(config, clock, self.room)
        self.events = StoreEventLog(config.max_events)
        self._forbidden: set[bytes] = set()
        self.num_evicted = 0

    def take(self, key: bytes, nbytes: int) -> int:
        """Count content that is about to be written, and return its entry, with one reference. There must be room."""
        self.room.reserve(nbytes)
        return self.index.take(key, nbytes)

    def publish(self, entry: int, parent: int) -> None:
        """Add an entry to the index, once written or found by a scan; it continues ``parent`` if that is known."""
        self.index.publish(entry, parent)
        self.events.note(StoreEventKind.STORED, self.index.key_of(entry))

    def abandon(self, entry: int) -> None:
        """Release an entry whose write failed, and delete its content, of which any part may have been written."""
        key, nbytes = self.index.key_of(entry), self.index.size_of(entry)
        self.index.abandon(entry)
        self.deletes.doom(key, nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether content of this size may be written now. Changes nothing."""
        return self.room.left_nbytes >= nbytes and self.index.has_vacant

    def make_room(self, nbytes: int) -> None:
        """Evict until content of this size may be written, once all that is to be deleted is."""
        short = nbytes - self._coming_nbytes
        self.evict(max(short, 0 if self.index.has_vacant else 1))

    def evict(self, nbytes: int) -> None:
        """Evict until so many bytes are to be deleted, or nothing can be evicted."""
        freed = 0
        while freed < nbytes and self.index.can_evict:
            entry = self.index.evict()
            key, size = self.index.key_of(entry), self.index.size_of(entry)
            freed += size
            self.num_evicted += 1
            self.events.note(StoreEventKind.REMOVED, key)
            self.deletes.doom(key, size)

    def measure(self, root_nbytes: int, free_nbytes: int | None, unlanded_nbytes: int) -> None:
        """Take what was measured, as :meth:`Room.measure`; evict what exceeds the cap or the floor."""
        self.room.measure(root_nbytes, free_nbytes, unlanded_nbytes)
        self.evict(-self._coming_nbytes)

    def remove(self, entry: int) -> None:
        """Take an entry out of the index, also while it is held, and delete its content.

        That is also done if its body answered that there is none: a server that answers so for a moment still has it.
        """
        key, nbytes = self.index.key_of(entry), self.index.size_of(entry)
        self.index.drop(entry)
        self.events.note(StoreEventKind.REMOVED, key)
        self.deletes.doom(key, nbytes)

    def remove_all(self, keys: set[bytes]) -> int:
        """Remove the entries of these keys, if there are any; return how many there were."""
        found = [entry for entry in map(self.index.find, sorted(keys)) if entry != NO_ENTRY]
        for entry in found:
            self.remove(entry)
        return len(found)

    def forbid(self, keys: set[bytes]) -> None:
        """Refuse to store or restore content of these keys from now on."""
        self._forbidden |= keys

    def is_forbidden(self, key: bytes) -> bool:
        """Whether content of a key was withdrawn. Changes nothing."""
        return key in self._forbidden

    def restore(self, found: list[tuple[bytes, int]]) -> int:
        """Enter what a scan found, keys and bytes, the least recently used first.

        What exceeds the limits is deleted, oldest first. Keys that are known or being deleted are left as they are.
        Returns how many were entered.
        """
        fresh = [each for each in found if each[0] not in self.deletes and self.index.find(each[0]) == NO_ENTRY]
        room = self.room.left_nbytes
        kept: list[tuple[bytes, int]] = []
        for key, nbytes in reversed(fresh):
            fits = nbytes <= min(room, LARGEST_ENTRY) and len(kept) < self.index.num_vacant
            self.room.enter(nbytes)
            if fits and key not in self._forbidden:
                room -= nbytes
                kept.append((key, nbytes))
            else:
                self.deletes.doom(key, nbytes)
        for key, nbytes in reversed(kept):
            entry = self.index.take(key, nbytes)
            self.publish(entry, NO_ENTRY)
            self.index.let_go(entry)
        return len(kept)

    def continuing(self, keys: set[bytes]) -> set[bytes]:
        """Return the keys of all entries that are known to continue one of these. O(entries). Changes nothing."""
        entries = [entry for entry in map(self.index.find, keys) if entry != NO_ENTRY]
        return {self.index.key_of(entry) for entry in self.index.continuing(entries)}

    def keys(self) -> set[bytes]:
        """Return the keys of all entries that can be loaded. O(entries). Changes nothing."""
        return {self.index.key_of(int(entry)) for entry in self.index.all_entries()}

    def check(self, writing_nbytes: int) -> None:
        """Check the index, and that all bytes are counted. Raises AssertionError. O(entries)."""
        self.index.check()
        self.deletes.check()
        entries = self.index.all_entries().astype(np.int32)
        ready, doomed = int(self.index.sizes_of(entries).astype(np.int64).sum()), self.deletes.nbytes
        counted = self.room.nbytes
        assert ready + writing_nbytes + doomed == counted, f"{ready} + {writing_nbytes} + {doomed}, counted {counted}"

    @property
    def _coming_nbytes(self) -> int:
        """Bytes that may be written once all that is to be deleted is; negative if too many stay."""
        return self.room.left_nbytes + self.deletes.nbytes
