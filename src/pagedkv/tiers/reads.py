"""The reads of a store: loads of chains of entries, and the one read of each key that they share.

::

    load --> one Reading a key: queued --> in flight --> end -----> each waiting load: are its leading keys read?
                                                  +----> overdue -> each waiting load ends before the key

A load is *cut* before the first key that cannot be read, and is answered when all keys before that are read. It holds
its entries until then. A reading holds its entry as well, until the driver reports its end.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.tiers.entries import Entries
from pagedkv.tiers.timing import BreakerState, CircuitBreaker, SteadyClock
from pagedkv.tiers.words import Answer, Fault, Loaded, LoadEnd, Read, StoreConfig, names_of, words_of

END_OF: Final = {Fault.GONE: LoadEnd.GONE, Fault.CORRUPT: LoadEnd.CORRUPT}
MOST_FAILURES: Final = 3
"""An entry whose reads fail or hang so often is removed, so that it is stored anew."""
MOST_FAILING: Final = 2**12
"""Keys whose failures are counted; beyond that all counts begin anew."""


@dataclass(slots=True)
class Ticket:
    """A load: ``limit`` leading keys can still be read, ``num_leading`` of them are, and ``cause`` ends them."""

    keys: list[bytes]
    entries: npt.NDArray[np.int32]
    is_done: bytearray
    sizes: npt.NDArray[np.int32]
    begun_s: float
    limit: int
    cause: LoadEnd
    num_leading: int = 0

    def cut(self, place: int, cause: LoadEnd) -> None:
        """End the load before a place, unless it ends earlier."""
        if place < self.limit:
            self.limit, self.cause = place, cause


@dataclass(slots=True)
class Reading:
    """The one read of a key: waiting loads with the place of the key in each. ``action`` is 0 while it is queued.

    A read ``is_probe`` if it was sent to find out whether the body works again.
    """

    entry: int
    nbytes: int
    waiters: list[tuple[int, int]]
    action: int = 0
    begun_s: float = 0.0
    is_late: bool = False
    is_probe: bool = False


class Reads:
    """Loads by ticket, readings by key, and the reads in flight.

    Args:
        config: most reads in flight, and their time limit.
        clock: the store's clock.
        entries: the entries of the store.
        breaker: while it is open, nothing is loaded.
        answer: called with the answer to each load.
    """

    def __init__(
        self,
        config: StoreConfig,
        clock: SteadyClock,
        entries: Entries,
        breaker: CircuitBreaker,
        answer: Callable[[Answer], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._entries = entries
        self._breaker = breaker
        self._index = entries.index
        self._answer = answer
        self._tickets: dict[int, Ticket] = {}
        self._readings: dict[bytes, Reading] = {}
        self._queue: deque[bytes] = deque()
        self._in_flight: dict[int, bytes] = {}
        self._failures: Counter[bytes] = Counter()
        self._rate = TransferRate()
        self.num_asked = 0
        self.num_loaded = 0
        self.num_coalesced = 0
        self.read_nbytes = 0
        self.not_loaded: Counter[LoadEnd] = Counter()

    @property
    def num_waiting(self) -> int:
        """Loads without an answer."""
        return len(self._tickets)

    @property
    def num_in_flight(self) -> int:
        """Reads in flight."""
        return len(self._in_flight)

    @property
    def num_prompt(self) -> int:
        """Reads in flight that are not overdue. O(reads in flight)."""
        return sum(not self.is_late(action) for action in self._in_flight)

    @property
    def can_begin(self) -> bool:
        """Whether a read is queued, and another one may be in flight."""
        return bool(self._queue) and len(self._in_flight) < self._config.max_reads

    def predict_s(self, nbytes: int, num_entries: int) -> float | None:
        """Predict the seconds to load so much, by the reads so far; None before the first. Changes nothing."""
        return self._rate.predict(nbytes, num_entries, self._config.max_reads)

    def load(self, number: int, keys: npt.NDArray[np.uint8]) -> None:
        """Begin a load of a chain, uint8 ``[n, 32]``, head first, with this number as its ticket."""
        entries, limit = self._index.look_up(words_of(keys))
        cause = LoadEnd.NONE if limit == len(keys) else LoadEnd.ABSENT
        if limit and self._breaker.is_open:
            limit, cause = 0, LoadEnd.OUT_OF_SERVICE
        entries = entries[:limit]
        names = names_of(keys)
        self._index.use(entries)
        sizes = self._index.sizes_of(entries)
        ticket = Ticket(names, entries, bytearray(limit), sizes, self._clock.now_s, limit, cause)
        self._tickets[number] = ticket
        self.num_asked += len(names)
        new = []
        for place, (entry, nbytes) in enumerate(zip(entries.tolist(), sizes.tolist(), strict=True)):
            if place >= ticket.limit:
                break
            if self._join(ticket, names[place], entry, nbytes, (number, place)):
                new.append(entry)
        self._index.hold(np.array(new, np.int32))
        self._settle(number)

    def end_load(self, number: int) -> bool:
        """End a load, and answer it with the entries read so far; return whether there was one of this number."""
        ticket = self._tickets.get(number)
        if ticket is None:
            return False
        ticket.cut(ticket.num_leading, LoadEnd.LATE)
        self._settle(number)
        return True

    def withdraw(self, keys: set[bytes]) -> None:
        """End each load before the first of these keys. O(keys of all loads)."""
        for number, ticket in list(self._tickets.items()):
            place = next((place for place in range(ticket.limit) if ticket.keys[place] in keys), None)
            if place is not None:
                ticket.cut(place, LoadEnd.WITHDRAWN)
                self._settle(number)

    def withdraw_all(self) -> None:
        """End all loads without an entry, also of entries that have left the index meanwhile. O(loads)."""
        for number, ticket in list(self._tickets.items()):
            ticket.cut(0, LoadEnd.WITHDRAWN)
            self._settle(number)

    def drop_queue(self) -> None:
        """Drop the reads that have not begun, since the body is out of service. Reads in flight go on."""
        while self._queue:
            reading = self._readings.pop(self._queue.popleft())
            self._fail_waiters(reading, LoadEnd.OUT_OF_SERVICE)
            self._index.let_go(reading.entry)

    def begin(self, action: int) -> Read:
        """Begin the read that has waited longest."""
        key = self._queue.popleft()
        reading = self._readings[key]
        reading.action, reading.begun_s = action, self._clock.now_s
        reading.is_probe = self._breaker.state is BreakerState.PROBING
        self._in_flight[action] = key
        return Read(action, key, reading.nbytes, self._clock.now_s + self._config.read_timeout_s)

    def awaits(self, action: int) -> bool:
        """Whether a read of this number is in flight."""
        return action in self._in_flight

    def key_of(self, action: int) -> bytes:
        """Return the key of a read in flight."""
        return self._in_flight[action]

    def seconds_of(self, action: int) -> float:
        """Return the seconds since a read in flight began."""
        return self._clock.now_s - self._readings[self._in_flight[action]].begun_s

    def is_late(self, action: int) -> bool:
        """Whether a read in flight is overdue."""
        return self._readings[self._in_flight[action]].is_late

    def expire(self, action: int) -> None:
        """Mark a read as overdue, if it is one in flight, and cut the loads that wait for it."""
        if action in self._in_flight:
            key = self._in_flight[action]
            reading = self._readings[key]
            reading.is_late = True
            if self._fails_often(key, reading):
                self._remove(key, reading)
            self._fail_waiters(reading, LoadEnd.LATE)

    def is_another_frame(self, action: int, nbytes: int | None) -> bool:
        """Whether an action is a read whose frame has another size than the index."""
        return nbytes is not None and self.awaits(action) and nbytes != self._readings[self._in_flight[action]].nbytes

    def end(self, action: int, fault: Fault | None) -> None:
        """End a read, and settle the loads that wait for it. What is gone or corrupt, or fails often, is removed."""
        key = self._in_flight.pop(action)
        reading = self._readings.pop(key)
        if fault is None:
            self.read_nbytes += reading.nbytes
            if not reading.is_late:
                self._failures.pop(key, None)
                self._rate.note(reading.nbytes, self._clock.now_s - reading.begun_s)
            for number, place in reading.waiters:
                if number in self._tickets:  # a load with the key twice may be settled already
                    self._tickets[number].is_done[place] = 1
                    self._settle(number)
        else:
            if fault in END_OF or (not reading.is_late and self._fails_often(key, reading)):
                self._remove(key, reading)
            self._fail_waiters(reading, END_OF.get(fault, LoadEnd.FAILED))
        self._index.let_go(reading.entry)

    def check(self) -> None:
        """Check that every load waits for reads, and every read is queued or in flight. Raises AssertionError."""
        assert len(self._in_flight) <= self._config.max_reads
        for number, ticket in self._tickets.items():
            assert ticket.num_leading < ticket.limit, f"load {number} has all keys that can be read, and no answer"
            for place in range(ticket.num_leading, ticket.limit):
                reading = self._readings.get(ticket.keys[place])
                is_awaited = reading is not None and (number, place) in reading.waiters
                assert ticket.is_done[place] or is_awaited, f"load {number} waits for no read at {place}"
        for key, reading in self._readings.items():
            assert bool(reading.action) == (key in self._in_flight.values()), "a read is neither queued nor begun"

    def _fails_often(self, key: bytes, reading: Reading) -> bool:
        """Count a read that failed or hangs; return whether the entry is to go.

        While the body fails, entries stay; but one whose probes fail goes, or it could keep the body out of service.
        """
        if len(self._failures) > MOST_FAILING:
            self._failures.clear()
        self._failures[key] += 1
        return self._failures[key] >= MOST_FAILURES and (reading.is_probe or not self._breaker.is_open)

    def _remove(self, key: bytes, reading: Reading) -> None:
        """Remove the entry that was read, if it is still that of its key."""
        self._failures.pop(key, None)
        if self._index.find(key) == reading.entry:
            self._entries.remove(reading.entry)

    def _join(self, ticket: Ticket, key: bytes, entry: int, nbytes: int, waiter: tuple[int, int]) -> bool:
        """Add a load to the read of a key; return whether that read is new, so that its entry must be held."""
        reading = self._readings.get(key)
        if reading is not None and not reading.is_late and reading.entry == entry:
            reading.waiters.append(waiter)
            self.num_coalesced += 1
            return False
        if reading is not None:  # an overdue read of the key is still in flight: at most one read a key
            ticket.cut(waiter[1], LoadEnd.LATE)
            return False
        self._readings[key] = Reading(entry, nbytes, [waiter])
        self._queue.append(key)
        return True

    def _settle(self, number: int) -> None:
        """Answer a load if none of its keys is awaited any more."""
        ticket = self._tickets[number]
        while ticket.num_leading < ticket.limit and ticket.is_done[ticket.num_leading]:
            ticket.num_leading += 1
        if ticket.num_leading < ticket.limit:
            return
        del self._tickets[number]
        num_loaded = ticket.limit
        self.num_loaded += num_loaded
        if num_loaded < len(ticket.keys):
            self.not_loaded[ticket.cause] += len(ticket.keys) - num_loaded
        for place in range(num_loaded, len(ticket.entries)):
            self._leave(ticket.keys[place], (number, place))
        self._index.let_go_chain(ticket.entries)
        nbytes = int(ticket.sizes[:num_loaded].astype(np.int64).sum())
        self._answer(Loaded(number, num_loaded, ticket.cause, nbytes, self._clock.now_s - ticket.begun_s))

    def _leave(self, key: bytes, waiter: tuple[int, int]) -> None:
        """Remove a load from a read; a queued read without loads is dropped."""
        reading = self._readings.get(key)
        if reading is None or waiter not in reading.waiters:
            return
        reading.waiters.remove(waiter)
        if not reading.waiters and not reading.action:
            self._queue.remove(key)
            del self._readings[key]
            self._index.let_go(reading.entry)

    def _fail_waiters(self, reading: Reading, cause: LoadEnd) -> None:
        waiters, reading.waiters = reading.waiters, []
        for number, place in waiters:
            if number in self._tickets:
                self._tickets[number].cut(place, cause)
                self._settle(number)


@dataclass(slots=True)
class TransferRate:
    """Seconds of a read by its bytes, learnt from reads: a line by least squares that forgets.

    Args:
        keeps: weight of the past at each new read.
    """

    keeps: float = 0.95
    weight: float = 0.0
    sum_bytes: float = 0.0
    sum_seconds: float = 0.0
    sum_squares: float = 0.0
    sum_products: float = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Record one read."""
        self.weight = self.weight * self.keeps + 1
        self.sum_bytes = self.sum_bytes * self.keeps + nbytes
        self.sum_seconds = self.sum_seconds * self.keeps + seconds
        self.sum_squares = self.sum_squares * self.keeps + float(nbytes) * nbytes
        self.sum_products = self.sum_products * self.keeps + float(nbytes) * seconds

    def predict(self, nbytes: int, num_reads: int, parallel: int) -> float | None:
        """Predict the seconds of ``num_reads`` reads of ``nbytes`` in all; None before the first read.

        Reads share the medium's bandwidth, and wait for it ``parallel`` at a time.
        """
        if not self.weight:
            return None
        spread = self.weight * self.sum_squares - self.sum_bytes**2
        per_byte = self.sum_seconds / max(self.sum_bytes, 1)
        latency = 0.0
        if spread > 1e-9 * self.weight * self.sum_squares:
            slope = (self.weight * self.sum_products - self.sum_bytes * self.sum_seconds) / spread
            start = (self.sum_seconds - slope * self.sum_bytes) / self.weight
            if slope >= 0 and start >= 0:
                per_byte, latency = slope, start
        return latency * -(-num_reads // parallel) + per_byte * nbytes
