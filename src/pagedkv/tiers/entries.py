"""The entries of a store, from the room for a write to the end of a delete: index, bytes and events change together.

::

    take --> (being written) --> publish --> (can be loaded) --> evict | remove --> (to be deleted) --> bytes are free
                   |                                                                      ^
                   +--------------------> abandon ----------------------------------------+
    (written by another process) --> adopt ----^           v
                                                           +--> lose: it vanished from the body

A reference in the index holds an entry: it is not evicted, and its number names no other content.

*Room.* Content counts from before its write begins until its delete is completed. Bytes of the root that are not the
store's count as foreign. Where the medium's free bytes are known, they follow the store's writes and deletes between
two measurements.

*Deletes.* Content that has left the index counts until its delete is completed. A delete that fails is sent again after
a pause. One that is overdue stays in flight until the driver reports it.

*Owners.* A store may have a share of bytes at most of one salt. Content is charged to its salt from before its write
until it leaves the index. The salt of what a scan found is unknown until it is offered: the key covers the salt, so an
entry belongs to one. Content without a salt has no cap.

*Scans* for what other processes store and delete. A scan takes long, so what it lists, or leaves out, may be older than
the index. Two rules make its result safe:

- A key that was removed since the scan began may be listed although its content is deleted. It is not entered.
- An entry that was published since then may be left out although it is there. Only an entry that was in the index
  before, and was neither listed nor published since, has vanished.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tiers.index import NO_ENTRY, StoreIndex
from pagedkv.tiers.timing import SteadyClock
from pagedkv.tiers.words import KEY_NBYTES, ZERO_KEY, Delete, Fault, StoreConfig, StoreEventKind, StoreEvents

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

    def shrink(self, entry: int, nbytes: int) -> None:
        """Lower the bytes of an entry that was not published yet."""
        spare = self.index.size_of(entry) - nbytes
        self.index.resize(entry, nbytes)
        self.owners.lower(entry, spare)
        self.room.release(spare)

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


class Room:
    """The bytes of one store.

    Args:
        cap_nbytes: most bytes.
        floor_nbytes: free bytes of the medium that stay free.
    """

    def __init__(self, cap_nbytes: int, floor_nbytes: int) -> None:
        self._cap_nbytes = cap_nbytes
        self._floor_nbytes = floor_nbytes
        self._free_nbytes: int | None = None
        self.nbytes = 0
        self.foreign_nbytes = 0

    @property
    def left_nbytes(self) -> int:
        """Bytes that may still be written now; negative if the cap is exceeded."""
        left = self._cap_nbytes - self.nbytes - self.foreign_nbytes
        return left if self._free_nbytes is None else min(left, self._free_nbytes - self._floor_nbytes)

    def enter(self, nbytes: int) -> None:
        """Count content that is there."""
        self.nbytes += nbytes

    def adopt(self, nbytes: int) -> None:
        """Count foreign content as the store's own. The sum stays, or grows if the content was not measured yet."""
        self.nbytes += nbytes
        self.foreign_nbytes = max(0, self.foreign_nbytes - nbytes)

    def disown(self, nbytes: int) -> None:
        """Count content of the store as foreign, until the next measurement. The sum stays."""
        self.nbytes -= nbytes
        self.foreign_nbytes += nbytes

    def could_own(self, nbytes: int) -> bool:
        """Whether the store's own content is within the cap with so many more bytes. Changes nothing."""
        return self.nbytes + nbytes <= self._cap_nbytes

    def reserve(self, nbytes: int) -> None:
        """Count content that is about to be written."""
        self.nbytes += nbytes
        if self._free_nbytes is not None:
            self._free_nbytes -= nbytes

    def release(self, nbytes: int) -> None:
        """Stop counting content, since it is deleted."""
        self.nbytes -= nbytes
        if self._free_nbytes is not None:
            self._free_nbytes += nbytes

    def measure(self, root_nbytes: int, free_nbytes: int | None, unlanded_nbytes: int) -> None:
        """Take what was measured while so many bytes were being written, none to all of which are counted in it."""
        self.foreign_nbytes = max(0, root_nbytes - (self.nbytes - unlanded_nbytes))
        self._free_nbytes = None if free_nbytes is None else free_nbytes - unlanded_nbytes


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


NO_OWNER: Final = 0
WHOLE: Final = 1.0


@dataclass(slots=True)
class Account:
    """The entries of one salt, and its number in the array of owners."""

    salt: bytes
    number: int
    num_entries: int = 0
    nbytes: int = 0


@final
class Owners:
    """Bytes by salt. Without a share below 1 nothing is counted, and it takes no memory.

    Args:
        config: the cap, the share, and the number of entries, each of which takes 4 bytes here.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.is_counting = config.salt_share < WHOLE
        self._cap_nbytes = config.cap_nbytes
        self._share_nbytes = int(config.salt_share * config.cap_nbytes)
        self._of_entry = np.zeros(config.max_entries + 1 if self.is_counting else 0, np.int32)
        self._accounts: dict[bytes, Account] = {}
        self._by_number: dict[int, Account] = {}
        self._next_number = NO_OWNER + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping by entry."""
        return self._of_entry.nbytes

    @property
    def of_entry(self) -> Int32Array:
        """The owner of each entry: int32 ``[entries]``; ``NO_OWNER`` where it is unknown or there is no salt."""
        return self._of_entry

    def most_nbytes(self, salt: bytes) -> int:
        """Most bytes of a salt."""
        return self._share_nbytes if salt and self.is_counting else self._cap_nbytes

    def number_of(self, salt: bytes) -> int:
        """Return the number of a salt in :attr:`of_entry`; ``NO_OWNER`` if it has no content."""
        account = self._accounts.get(salt)
        return NO_OWNER if account is None else account.number

    def nbytes_of(self, salt: bytes) -> int:
        """Bytes that are charged to a salt."""
        account = self._accounts.get(salt)
        return 0 if account is None else account.nbytes

    def excess(self, salt: bytes, nbytes: int) -> int:
        """Return by how many bytes a salt would exceed its share with so many more; 0 if it would not."""
        if not salt or not self.is_counting:
            return 0
        return max(0, self.nbytes_of(salt) + nbytes - self._share_nbytes)

    def charge(self, entry: int, nbytes: int, salt: bytes) -> None:
        """Charge an entry without an owner to a salt."""
        if not salt or not self.is_counting:
            return
        account = self._accounts.get(salt)
        if account is None:
            account = self._accounts[salt] = self._by_number[self._next_number] = Account(salt, self._next_number)
            self._next_number += 1
        self._of_entry[entry] = account.number
        account.num_entries += 1
        account.nbytes += nbytes

    def claim(self, entries: Int32Array, sizes: Int32Array, salt: bytes) -> None:
        """Charge those of these entries to a salt whose owner is unknown. O(entries)."""
        if not salt or not self.is_counting:
            return
        is_unknown = self._of_entry[entries] == NO_OWNER
        for entry, nbytes in zip(entries[is_unknown].tolist(), sizes[is_unknown].tolist(), strict=True):
            self.charge(entry, nbytes, salt)

    def lower(self, entry: int, nbytes: int) -> None:
        """Lower the charge of an entry, which stays."""
        number = int(self._of_entry[entry]) if self.is_counting else NO_OWNER
        if number != NO_OWNER:
            self._by_number[number].nbytes -= nbytes

    def discharge(self, entry: int, nbytes: int) -> None:
        """End the charge of an entry that leaves the index; a salt without entries is forgotten."""
        number = int(self._of_entry[entry]) if self.is_counting else NO_OWNER
        if number == NO_OWNER:
            return
        self._of_entry[entry] = NO_OWNER
        account = self._by_number[number]
        account.num_entries -= 1
        account.nbytes -= nbytes
        if not account.num_entries:
            del self._by_number[number], self._accounts[account.salt]

    def check(self, sizes: Int32Array) -> None:
        """Check the bytes of each salt by the sizes of all entries. Raises AssertionError. O(entries x salts)."""
        if not self.is_counting:
            return
        for number, account in self._by_number.items():
            is_own = self._of_entry == number
            counted = (int(is_own.sum()), int(sizes[is_own].astype(np.int64).sum()))
            assert counted == (account.num_entries, account.nbytes), (
                f"entries and bytes of a salt: {counted}, {account}"
            )
        owned = sum(account.num_entries for account in self._by_number.values())
        assert owned == np.count_nonzero(self._of_entry), "an entry has an owner without an account"


@final
class OpenScan:
    """A scan under way.

    Args:
        max_entries: most entries of the index; one byte each while the scan is open.
        departing: keys whose deletes are not completed yet.
        purges: the store was reset since the last whole scan, so what the index does not have is older than the reset.

    Attributes:
        first_unseen: the entry up to which vanished ones were looked for.
    """

    def __init__(self, max_entries: int, departing: Iterable[bytes], *, purges: bool) -> None:
        self.purges = purges
        self.first_unseen = 1
        self._departed = set(departing)
        self._is_seen = np.zeros(max_entries + 1, np.bool_)

    def see(self, entries: Int32Array | int) -> None:
        """Note entries that were listed, or were published since the scan began."""
        self._is_seen[entries] = True

    def depart(self, key: bytes) -> None:
        """Note a key whose content is to be deleted."""
        self._departed.add(key)

    def has_departed(self, key: bytes) -> bool:
        """Whether a key may be listed although its content is deleted. Changes nothing."""
        return key in self._departed

    def unseen(self, entries: npt.NDArray[np.int64]) -> list[int]:
        """Return those of these entries that were neither listed nor published. Changes nothing."""
        return [int(entry) for entry in entries[~self._is_seen[entries]]]


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
