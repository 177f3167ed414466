"""The entries of a store: index, bytes and events change together.

::

    take --> (being written) --> publish --> (can be loaded) --> evict | remove --> (to be deleted) --> bytes are free
                   |                                                                      ^
                   +--------------------> abandon ----------------------------------------+
    (written by another process) --> adopt ----^           v
                                                           +--> lose: it vanished from the body

A reference in the index holds an entry: it is not evicted, and its number names no other content.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Uint32Array
from pagedkv.tiers.actions import StoreEventKind
from pagedkv.tiers.config import StoreConfig
from pagedkv.tiers.deadlines import SteadyClock
from pagedkv.tiers.deletes import Deletes
from pagedkv.tiers.event_log import StoreEventLog
from pagedkv.tiers.index import NO_ENTRY, StoreIndex
from pagedkv.tiers.open_scan import OpenScan
from pagedkv.tiers.owners import Owners
from pagedkv.tiers.room import Room

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
        self.owners = Owners(config)
        self._forbidden: set[bytes] = set()
        self._max_entries = config.max_entries
        self._scan: OpenScan | None = None
        self._was_reset = False
        self.num_evicted = 0
        self.num_found = 0
        self.num_vanished = 0

    def take(self, key: bytes, nbytes: int, salt: bytes) -> int:
        """Count content that is about to be written, and return its entry, with one reference. There must be room."""
        self.room.reserve(nbytes)
        entry = self.index.take(key, nbytes)
        self.owners.charge(entry, nbytes, salt)
        return entry

    def publish(self, entry: int, parent: int) -> None:
        """Add an entry to the index, once written or found by a scan; it continues ``parent`` if that is known."""
        self.index.publish(entry, parent)
        if self._scan is not None:
            self._scan.see(entry)
        self.events.note(StoreEventKind.STORED, self.index.key_of(entry))

    def abandon(self, entry: int) -> None:
        """Release an entry whose write failed, and delete its content, of which any part may have been written."""
        key, nbytes = self.index.key_of(entry), self.index.size_of(entry)
        self.owners.discharge(entry, nbytes)
        self.index.abandon(entry)
        self._doom(key, nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether content of this size may be written now. Changes nothing."""
        return self.room.left_nbytes >= nbytes and self.index.has_vacant

    def make_room(self, nbytes: int) -> None:
        """Evict until content of this size may be written, once all that is to be deleted is."""
        short = nbytes - self._coming_nbytes
        self.evict(max(short, 0 if self.index.has_vacant else 1))

    def evict(self, nbytes: int) -> int:
        """Evict until so many bytes are to be deleted, or nothing can be evicted; return their number."""
        freed = 0
        while freed < nbytes and self.index.can_evict:
            entry = self.index.evict()
            key, size = self.index.key_of(entry), self.index.size_of(entry)
            freed += size
            self.owners.discharge(entry, size)
            self.num_evicted += 1
            self.events.note(StoreEventKind.REMOVED, key)
            self._doom(key, size)
        return freed

    def evict_own(self, salt: bytes, nbytes: int) -> bool:
        """Evict entries of a salt until it may have so many bytes more; return whether it may. O(entries) for each.

        The order is that of the queue; entries in use are not evicted.
        """
        while self.owners.excess(salt, nbytes):
            entry = self.index.first_evictable(self.owners.of_entry, self.owners.number_of(salt))
            if entry == NO_ENTRY:
                return False
            self.num_evicted += 1
            self.remove(entry)
        return True

    def measure(self, root_nbytes: int, free_nbytes: int | None, unlanded_nbytes: int) -> None:
        """Take what was measured, as :meth:`Room.measure`; evict what exceeds the cap or the floor."""
        self.room.measure(root_nbytes, free_nbytes, unlanded_nbytes)
        self.evict(-self._coming_nbytes)

    def remove(self, entry: int) -> None:
        """Take an entry out of the index, also while it is held, and delete its content.

        That is also done if its body answered that there is none: a server that answers so for a moment still has it.
        """
        key, nbytes = self.index.key_of(entry), self.index.size_of(entry)
        self.owners.discharge(entry, nbytes)
        self.index.drop(entry)
        self.events.note(StoreEventKind.REMOVED, key)
        self._doom(key, nbytes)

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
        sizes = dict(found)  # a server may list a key twice
        fresh = [key for key in sizes if key not in self.deletes and self.index.find(key) == NO_ENTRY]
        room = self.room.left_nbytes
        kept: list[tuple[bytes, int]] = []
        for key in reversed(fresh):
            nbytes = sizes[key]
            fits = nbytes <= min(room, LARGEST_ENTRY) and len(kept) < self.index.num_vacant
            self.room.enter(nbytes)
            if fits and key not in self._forbidden:
                room -= nbytes
                kept.append((key, nbytes))
            else:
                self._doom(key, nbytes)
        for key, nbytes in reversed(kept):
            entry = self.index.take(key, nbytes)
            self.publish(entry, NO_ENTRY)
            self.index.let_go(entry)
        return len(kept)

    # Scans while the store runs

    def begin_scan(self) -> None:
        """Begin to compare the index with a scan of the body; an open scan is given up. O(max_entries)."""
        self._scan = OpenScan(self._max_entries, self.deletes.keys, purges=self._was_reset)

    def end_scan(self, *, is_whole: bool) -> None:
        """End the open scan, if there is one. ``is_whole``: it has listed all that is there."""
        if self._scan is not None and is_whole:
            self._was_reset = False
        self._scan = None

    def forget_scans(self) -> None:
        """Give up the open scan, since all entries are removed; what the next one finds is from before that."""
        self._scan, self._was_reset = None, True

    def compare_scan(self, keys: Uint32Array) -> npt.NDArray[np.bool_]:
        """Take keys that the open scan has listed, uint32 ``[n, 8]``; return which the index does not have. O(n)."""
        entries, _ = self.index.look_up(keys)
        if self._scan is None:
            return np.zeros(len(keys), np.bool_)
        self._scan.see(entries)
        return np.asarray(entries == NO_ENTRY)

    def adopt(self, found: list[tuple[bytes, int]]) -> int:
        """List what the open scan has found, keys and bytes, and the index does not have; return how many were listed.

        Nothing is evicted or deleted for it: what has no room, was withdrawn, or was removed since the scan began, is
        left as it is. After a reset, what is found is deleted instead.
        """
        scan, num_before = self._scan, self.num_found
        if scan is None:
            return 0
        for key, nbytes in found:
            if key in self._forbidden or scan.has_departed(key) or self.index.find(key) != NO_ENTRY:
                continue
            if scan.purges:
                self.room.adopt(nbytes)
                self._doom(key, nbytes)
            elif self.index.has_vacant and self.room.could_own(nbytes) and nbytes <= LARGEST_ENTRY:
                self.room.adopt(nbytes)
                entry = self.index.take(key, nbytes)
                self.publish(entry, NO_ENTRY)
                self.index.let_go(entry)
                self.num_found += 1
        return self.num_found - num_before

    def lose_vanished(self, most: int) -> bool:
        """Remove those that the open scan did not list, of the next ``most`` entries; return whether there are more.

        Their bytes count as foreign until the next measurement, since a server may leave out what it still has.
        """
        scan = self._scan
        if scan is None or scan.first_unseen > self._max_entries:
            return False
        first, scan.first_unseen = scan.first_unseen, scan.first_unseen + most
        for entry in scan.unseen(self.index.entries_between(first, scan.first_unseen)):
            key, nbytes = self.index.key_of(entry), self.index.size_of(entry)
            self.owners.discharge(entry, nbytes)
            self.index.drop(entry)
            self.room.disown(nbytes)
            self.events.note(StoreEventKind.REMOVED, key)
            self.num_vanished += 1
        return scan.first_unseen <= self._max_entries

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
        self.owners.check(self.index.sizes)
        entries = self.index.all_entries().astype(np.int32)
        ready, doomed = int(self.index.sizes_of(entries).astype(np.int64).sum()), self.deletes.nbytes
        counted = self.room.nbytes
        assert ready + writing_nbytes + doomed == counted, f"{ready} + {writing_nbytes} + {doomed}, counted {counted}"

    def _doom(self, key: bytes, nbytes: int) -> None:
        """Note that content, which counts already, is to be deleted."""
        if self._scan is not None:
            self._scan.depart(key)
        self.deletes.doom(key, nbytes)

    @property
    def _coming_nbytes(self) -> int:
        """Bytes that may be written once all that is to be deleted is; negative if too many stay."""
        return self.room.left_nbytes + self.deletes.nbytes
