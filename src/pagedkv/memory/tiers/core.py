"""The store core: it decides what a tier stores, loads, deletes and refuses. A driver carries its actions out.

No thread, no clock, no I/O: times are the caller's, actions leave by :meth:`StoreCore.take_actions`, results return by
:meth:`~StoreCore.completed` and :meth:`~StoreCore.failed`, and answers to callers leave by
:meth:`~StoreCore.take_answers`. So threads drive it, and a simulation drives the same code on a virtual clock::

    ask ----> reads queued --> Read in flight ---> completed | failed | late ----> Loaded: the longest leading run
    offer --> admission --> stores queued --> room? --> Write in flight ---------> Offered: what became of each key
                                       evicted --> Delete in flight --> bytes are free

What is true at every moment (:meth:`~StoreCore.check`):

- Every ask has an answer by its deadline, and every key of an offer has one.
- The bytes of entries, writes, deletes and the root's foreign bytes are within the cap. A write counts before it
  begins; a delete until it is completed; a write that failed until its delete is.
- One read a key is in flight, however many ask.
- An entry with a read in flight, or with an ask or an offer that waits, is not evicted.
"""

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.tiers.actions import (
    Action,
    Answer,
    Fault,
    Offered,
    StoreEventKind,
    StoreEvents,
    StoreOutcome,
    Write,
)
from pagedkv.memory.tiers.admission import OfferedOnce
from pagedkv.memory.tiers.breaker import BreakerState, CircuitBreaker
from pagedkv.memory.tiers.config import StoreConfig
from pagedkv.memory.tiers.deadlines import Deadlines, SteadyClock
from pagedkv.memory.tiers.entries import LARGEST_ENTRY, Entries
from pagedkv.memory.tiers.index import NO_ENTRY
from pagedkv.memory.tiers.keys import ZERO_KEY, as_keys, names_of, words_of
from pagedkv.memory.tiers.reads import Reads
from pagedkv.memory.tiers.statistics import StoreCounts, StoreStatistics
from pagedkv.memory.tiers.under_way import InFlight, Offer, Writing

__all__ = ["StoreCore"]

BREAKING: Final = frozenset({Fault.TIMEOUT, Fault.IO})


class StoreCore:
    """The decisions of one store.

    Args:
        config: its settings.
        now_s: the caller's clock.
    """

    def __init__(self, config: StoreConfig, now_s: float = 0.0) -> None:
        """Build an empty store. O(max_entries)."""
        self.config = config
        self._answers: list[Answer] = []
        self._clock = SteadyClock()
        self._now_s = self._clock.advance(now_s)
        self._entries = Entries(config, self._clock)
        self._deletes = self._entries.deletes
        self._index = self._entries.index
        self._room = self._entries.room
        self._offered_once = OfferedOnce(config.max_entries) if config.admission == "second-offer" else None
        self._breaker = CircuitBreaker(config.breaker_failures, config.breaker_pause_s, config.breaker_longest_pause_s)
        self._counts = StoreCounts()
        self._reads = Reads(config, self._clock, self._entries, self._answers.append)
        self._offers: dict[int, Offer] = {}
        self._writing: dict[bytes, int] = {}
        self._in_flight = InFlight()
        self._store_queue: deque[tuple[int, int]] = deque()
        self._queued: set[bytes] = set()
        self._queued_nbytes = 0
        self._writes_from_s = 0.0
        self._deadlines = Deadlines()
        self._actions: list[Action] = []

    def look_up(self, keys: npt.NDArray[np.uint8]) -> int:
        """Count the leading keys, uint8 ``[n, 32]``, that can be loaded. O(keys). Changes nothing."""
        if self._breaker.state is BreakerState.OPEN:
            return 0
        return self._index.look_up(words_of(as_keys(keys)))[1]

    @property
    def breaker(self) -> BreakerState:
        """State of the circuit breaker."""
        return self._breaker.state

    @property
    def queue_room_nbytes(self) -> int:
        """Bytes that can be offered now before offers are dropped."""
        return max(0, self.config.max_queued_nbytes - self._queued_nbytes)

    def contains(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return, for each key, uint8 ``[n, 32]``, whether its entry can be loaded. O(keys). Changes nothing."""
        if self._breaker.state is BreakerState.OPEN:
            return np.zeros(len(keys), np.bool_)
        entries, _ = self._index.look_up(words_of(as_keys(keys)))
        return np.asarray(entries != NO_ENTRY)

    def wants(self, keys: npt.NDArray[np.uint8], now_s: float) -> npt.NDArray[np.bool_]:
        """Note that content could be offered; return for each key, uint8 ``[n, 32]``, whether it is to be offered now.

        It is not if it is there, queued, being written or deleted, withdrawn, not admitted yet, or if the body is out
        of service. What is there counts as used. An :meth:`offer` with ``is_noted`` follows for the others.
        """
        keys = as_keys(keys)
        self.tick(now_s)
        words = words_of(keys)
        entries, _ = self._index.look_up(words)
        is_there = np.asarray(entries != NO_ENTRY)
        self._index.use(entries[is_there].astype(np.int32))
        admitted = np.ones(len(keys), np.bool_) if self._offered_once is None else self._offered_once.note(words)
        return np.array(
            [
                not there and self._outcome_at_once(key.tobytes(), 0, is_held=False, is_admitted=bool(may)) is None
                for key, there, may in zip(keys, is_there.tolist(), admitted.tolist(), strict=True)
            ],
            np.bool_,
        )

    def predict_s(self, nbytes: int, num_entries: int) -> float | None:
        """Predict the seconds to load so much, by the reads so far; None before the first. Changes nothing."""
        return self._reads.predict_s(nbytes, num_entries)

    def ask(self, keys: npt.NDArray[np.uint8], now_s: float, deadline_s: float) -> int:
        """Ask for the entries of a chain, head first; return a ticket, which :class:`Loaded` answers.

        Args:
            keys: uint8 ``[n, 32]``.
            now_s: the caller's clock.
            deadline_s: seconds from now on after which the answer is what has come by then.

        Raises:
            ConfigurationError: keys of another shape, or a deadline that is not above 0.
        """
        keys = as_keys(keys)
        if not deadline_s > 0:
            raise ConfigurationError(f"the deadline of an ask must be above 0 seconds, got {deadline_s}")
        self.tick(now_s)
        ticket = self._deadlines.take_number()
        self._deadlines.add(ticket, self._now_s + deadline_s)
        self._reads.ask(ticket, keys, is_in_service=self._breaker.state is not BreakerState.OPEN)
        self._pump()
        return ticket

    def cancel(self, ticket: int) -> None:
        """End an ask whose request is gone; it is answered with what has come. Reads of other asks go on."""
        self._reads.end_ask(ticket)

    def offer(
        self,
        keys: npt.NDArray[np.uint8],
        sizes: list[int],
        now_s: float,
        parent: bytes = ZERO_KEY,
        *,
        is_noted: bool = False,
    ) -> int:
        """Offer the content of a chain, head first; return the offer's number. :class:`Offered` answers each key.

        Args:
            keys: uint8 ``[n, 32]``, no key twice.
            sizes: bytes of each frame.
            now_s: the caller's clock.
            parent: key of the entry before the first one, if it is known.
            is_noted: :meth:`wants` has answered for these keys, so they are admitted.

        Raises:
            ConfigurationError: keys of another shape, a key twice, or sizes that are not as many, below 1 or not int32.
        """
        keys = as_keys(keys)
        if len(sizes) != len(keys):
            raise ConfigurationError(f"{len(keys)} keys need as many sizes, got {len(sizes)}")
        sizes = [as_count(nbytes, "the size of an entry", least=1, most=LARGEST_ENTRY) for nbytes in sizes]
        names = names_of(keys)
        if len(set(names)) != len(names):
            raise ConfigurationError("a key is offered twice at once")
        self.tick(now_s)
        offer = self._deadlines.take_number()
        words = words_of(keys)
        entries, _ = self._index.look_up(words)
        held = np.where(entries != NO_ENTRY, entries, 0).astype(np.int32)
        self._index.use(held[held != NO_ENTRY])
        self._offers[offer] = Offer(names, sizes, bytes(parent), held, len(names))
        self._counts.num_offered += len(names)
        is_admitted = np.ones(len(names), bool)
        if self._offered_once is not None and not is_noted:
            is_admitted = self._offered_once.note(words)
        for place, name in enumerate(names):
            outcome = self._outcome_at_once(
                name, sizes[place], is_held=bool(held[place]), is_admitted=bool(is_admitted[place])
            )
            if outcome is not None:
                self._answer(offer, place, outcome)
                continue
            self._store_queue.append((offer, place))
            self._queued.add(name)
            self._queued_nbytes += sizes[place]
        if names:
            self._deadlines.add(offer, self._now_s + self.config.write_timeout_s)
        else:
            self._close_offer(offer)
        self._pump()
        return offer

    def drop_queue(self, now_s: float) -> None:
        """Drop all offered content that waits, as where its blocks are needed. Writes in flight go on."""
        self.tick(now_s)
        while self._store_queue:
            self._drop_first(StoreOutcome.LATE)

    def withdraw(self, keys: npt.NDArray[np.uint8], now_s: float) -> int:
        """Remove entries whose content turned out bad, and all that is known to continue them.

        They are deleted, and for the life of this core neither loaded nor stored again. Asks that wait for one end
        before it. Returns how many entries were removed. O(entries).
        """
        self.tick(now_s)
        names = self._with_continuations(set(names_of(as_keys(keys))))
        self._entries.withdrawn |= names
        return self._forget(names, StoreOutcome.WITHDRAWN)

    def reset(self, now_s: float) -> int:
        """Remove all entries, as after new weights. Returns how many."""
        self.tick(now_s)
        names = self._entries.keys()
        names |= self._queued | set(self._writing)
        removed = self._forget(names, StoreOutcome.WITHDRAWN)
        self._entries.events.note(StoreEventKind.CLEARED)
        return removed

    def restore(self, keys: npt.NDArray[np.uint8], sizes: list[int], now_s: float) -> int:
        """Enter what a scan found, the least recently used first; what exceeds the limits is deleted, oldest first.

        Keys that are known, being written or being deleted are left as they are. Returns how many were entered.
        """
        self.tick(now_s)
        names = names_of(as_keys(keys))
        found = zip(names, sizes, strict=True)
        num_entered = self._entries.restore([each for each in found if each[0] not in self._writing])
        self._pump()
        return num_entered

    def measured(self, root_nbytes: int, free_nbytes: int | None, now_s: float) -> None:
        """Take what a body measured: all bytes of its root, and the free bytes of its medium (None: not known).

        Bytes of the root that are not this store's count as foreign.
        """
        self.tick(now_s)
        unlanded = sum(each.nbytes for each in self._in_flight.writes.values())  # at most: how much landed is not known
        self._entries.measure(root_nbytes, free_nbytes, unlanded)
        self._pump()

    def completed(self, action: int, now_s: float, nbytes: int | None = None) -> None:
        """Report that an action is done. For a read: its frame is verified, and ``nbytes`` long."""
        self._require_in_flight(action)
        self.tick(now_s)
        self._breaker.note_success()
        if self._reads.awaits(action):
            fault = Fault.CORRUPT if self._reads.is_another_frame(action, nbytes) else None
            if fault is not None:
                self._counts.faults[str(fault)] += 1
            self._reads.end(action, fault)
        elif action in self._in_flight.writes:
            self._end_write(action, None)
        else:
            self._deletes.end(action, None)
        self._pump()

    def failed(self, action: int, fault: Fault, now_s: float) -> None:
        """Report that an action failed and that none of its bytes can land any more."""
        self._require_in_flight(action)
        self.tick(now_s)
        flight = self._in_flight
        self._counts.faults[str(fault)] += 1
        if fault not in BREAKING:
            self._breaker.note_success()
        elif not self._was_late(action):
            self._note_failure()
        if self._reads.awaits(action):
            self._reads.end(action, fault)
        elif action in flight.writes:
            self._end_write(action, fault)
        else:
            self._deletes.end(action, fault)
        self._pump()

    def _require_in_flight(self, action: int) -> None:
        flight = self._in_flight
        is_write = action in flight.writes and not flight.writes[action].is_written
        if not self._reads.awaits(action) and not is_write and not self._deletes.awaits(action):
            raise ConfigurationError(f"action {action} is not in flight: it was reported before, or is another store's")

    def tick(self, now_s: float) -> None:
        """Set the time: what is overdue is late from now on. O(overdue)."""
        self._now_s = self._clock.advance(now_s)
        self._index.advance(self._now_s)
        while (number := self._deadlines.pop_overdue(self._now_s)) is not None:
            if self._reads.end_ask(number):
                continue
            if number in self._offers:
                self._drop_queued(number)
            else:
                self._expire_action(number)
        self._breaker.advance(self._now_s)
        self._pump()

    def next_deadline_s(self) -> float | None:
        """Return the seconds from now until :meth:`tick` has something to do; None if it has not. Changes nothing."""
        times = [] if self._deadlines.first_s is None else [self._deadlines.first_s]
        if self._breaker.state is BreakerState.OPEN:
            times.append(self._breaker.opens_again_s)
        times += [self._writes_from_s] if self._store_queue and self._writes_from_s > self._now_s else []
        retry_s = self._deletes.next_retry_s()
        times += [] if retry_s is None else [retry_s]
        return max(0.0, min(times) - self._now_s) if times else None

    def take_actions(self) -> list[Action]:
        """Take the actions since the last call, to be carried out in any order."""
        actions, self._actions = self._actions, []
        return actions

    def take_answers(self) -> list[Answer]:
        """Take the answers since the last call."""
        answers = self._answers.copy()
        self._answers.clear()
        return answers

    def drain_events(self) -> StoreEvents:
        """Take the events since the last call."""
        return self._entries.events.drain()

    @property
    def now_s(self) -> float:
        """The steady clock, by which the deadlines of actions are given."""
        return self._now_s

    def statistics(self) -> StoreStatistics:
        """Take a snapshot. Changes nothing."""
        counts = self._counts
        extra = self._offered_once.nbytes if self._offered_once is not None else 0
        return StoreStatistics(
            num_entries=len(self._index),
            nbytes=self._room.nbytes + self._room.foreign_nbytes,
            foreign_nbytes=self._room.foreign_nbytes,
            num_reads=self._reads.num_in_flight,
            num_writes=len(self._in_flight.writes),
            num_deletes=self._deletes.num_in_flight,
            num_waiting=self._reads.num_waiting,
            num_queued=len(self._store_queue),
            num_asked=self._reads.num_asked,
            num_loaded=self._reads.num_loaded,
            num_not_loaded=dict(self._reads.not_loaded),
            num_coalesced=self._reads.num_coalesced,
            num_offered=counts.num_offered,
            offers=dict(counts.offers),
            read_nbytes=self._reads.read_nbytes,
            written_nbytes=counts.written_nbytes,
            num_evicted=self._entries.num_evicted,
            faults=dict(counts.faults),
            breaker=self._breaker.state,
            times_opened=self._breaker.times_opened,
            index_nbytes=self._index.nbytes + extra,
        )

    def check(self) -> None:
        """Check every invariant. Raises AssertionError. O(entries)."""
        self._entries.check(sum(each.nbytes for each in self._in_flight.writes.values()))
        assert self._queued_nbytes == sum(self._offers[offer].sizes[place] for offer, place in self._store_queue)
        assert {self._offers[offer].keys[place] for offer, place in self._store_queue} == self._queued
        self._reads.check()
        assert len(self._in_flight.writes) <= self.config.max_writes
        assert {each.key for each in self._in_flight.writes.values()} == set(self._writing)
        num_open = dict.fromkeys(self._offers, 0)
        for offer, _ in self._store_queue:
            num_open[offer] += 1
        for writing_ in self._in_flight.writes.values():
            if writing_.offer in num_open and not writing_.is_late:
                num_open[writing_.offer] += 1
        assert num_open == {number: each.num_open for number, each in self._offers.items()}, "open offers miscounted"
        offers = sum(self._counts.offers.values()) + sum(num_open.values())
        assert offers == self._counts.num_offered, f"{offers} keys of {self._counts.num_offered} accounted for"

    def _outcome_at_once(self, key: bytes, nbytes: int, *, is_held: bool, is_admitted: bool) -> StoreOutcome | None:
        """Return what becomes of an offered key without a write; None if it is to be written."""
        outcome = None
        if is_held or key in self._writing or key in self._queued:
            outcome = StoreOutcome.PRESENT
        elif key in self._entries.withdrawn:
            outcome = StoreOutcome.WITHDRAWN
        elif self._breaker.state is BreakerState.OPEN:
            outcome = StoreOutcome.OUT_OF_SERVICE
        elif not is_admitted:
            outcome = StoreOutcome.NOT_ADMITTED
        elif nbytes > self.config.cap_nbytes:
            outcome = StoreOutcome.NO_ROOM
        elif key in self._deletes or self._queued_nbytes + nbytes > self.config.max_queued_nbytes:
            outcome = StoreOutcome.BUSY
        return outcome

    def _answer(self, offer: int, place: int, outcome: StoreOutcome) -> None:
        self._counts.offers[outcome] += 1
        self._answers.append(Offered(offer, place, outcome))
        offered = self._offers[offer]
        offered.num_open -= 1
        if not offered.num_open:
            self._close_offer(offer)

    def _close_offer(self, number: int) -> None:
        offered = self._offers.pop(number)
        self._index.let_go_chain(offered.held[offered.held != NO_ENTRY])

    def _drop_queued(self, number: int, outcome: StoreOutcome = StoreOutcome.LATE) -> None:
        """Drop the keys of an offer that still wait."""
        waiting = [each for each in self._store_queue if each[0] == number]
        self._store_queue = deque(each for each in self._store_queue if each[0] != number)
        for offer, place in waiting:
            self._unqueue(offer, place)
            self._answer(offer, place, outcome)

    def _drop_first(self, outcome: StoreOutcome) -> None:
        """Drop the key that has waited longest."""
        offer, place = self._store_queue.popleft()
        self._unqueue(offer, place)
        self._answer(offer, place, outcome)

    def _outcome_of_scan(self, key: bytes) -> StoreOutcome | None:
        """Return what becomes of a queued key that a scan has found in the meantime; None if it has not."""
        if self._index.find(key) != NO_ENTRY:
            return StoreOutcome.PRESENT
        return StoreOutcome.BUSY if key in self._deletes else None

    def _unqueue(self, offer: int, place: int) -> None:
        offered = self._offers[offer]
        self._queued.discard(offered.keys[place])
        self._queued_nbytes -= offered.sizes[place]

    def _end_write(self, action: int, fault: Fault | None) -> None:
        """End a write, and those that succeeded earlier and waited for it. O(writes in flight)."""
        writing = self._in_flight.writes[action]
        writing.is_written = fault is None
        if self._waits_for_parent(writing):
            return
        self._settle_write(action, fault)
        while (ready := self._first_to_settle()) is not None:
            self._settle_write(ready, None)

    def _first_to_settle(self) -> int | None:
        writes = self._in_flight.writes.items()
        return next(
            (each for each, writing in writes if writing.is_written and not self._waits_for_parent(writing)), None
        )

    def _waits_for_parent(self, writing: Writing) -> bool:
        """Whether a write that succeeded waits for that of its parent, so that the index links the two entries.

        Keys that claim to continue each other do not wait.
        """
        if not writing.is_written or writing.is_late or writing.is_doomed or writing.parent not in self._writing:
            return False
        above = writing
        for _ in self._writing:
            if above.parent not in self._writing:
                return True
            above = self._in_flight.writes[self._writing[above.parent]]
            if not above.is_written:
                return True
        return False

    def _settle_write(self, action: int, fault: Fault | None) -> None:
        writing = self._in_flight.writes.pop(action)
        del self._writing[writing.key]
        outcome = StoreOutcome.STORED
        if fault is None and not writing.is_doomed:
            offered = self._offers.get(writing.offer)
            self._counts.written_nbytes += writing.nbytes
            self._entries.publish(writing.entry, self._index.find(writing.parent))
            if offered is None or writing.is_late:
                self._index.let_go(writing.entry)
            else:
                offered.held[writing.place] = writing.entry
        else:
            self._entries.abandon(writing.entry)
            if fault is Fault.FULL:
                self._writes_from_s = self._now_s + self.config.full_pause_s
                self._entries.evict(writing.nbytes)
            full = StoreOutcome.NO_ROOM if fault is Fault.FULL else StoreOutcome.FAILED
            outcome = StoreOutcome.WITHDRAWN if fault is None else full
        if not writing.is_late:
            self._answer(writing.offer, writing.place, outcome)

    def _with_continuations(self, names: set[bytes]) -> set[bytes]:
        """Add to these keys all that are known to continue them: of entries, and of offers under way."""
        names, num_before = set(names), -1
        while len(names) > num_before:
            num_before = len(names)
            names |= self._entries.continuing(names)
            for offered in self._offers.values():
                chain = [offered.parent, *offered.keys]
                first = next((place for place, key in enumerate(chain) if key in names), len(chain))
                names.update(chain[first:])
        return names

    def _forget(self, names: set[bytes], outcome: StoreOutcome) -> int:
        """Remove entries by key, whatever is under way with them."""
        self._reads.withdraw(names)
        for offer, place in [each for each in self._store_queue if self._offers[each[0]].keys[each[1]] in names]:
            self._store_queue.remove((offer, place))
            self._unqueue(offer, place)
            self._answer(offer, place, outcome)
        for name in sorted(names):
            if name in self._writing:
                self._in_flight.writes[self._writing[name]].is_doomed = True
        num_removed = self._entries.remove_all(names)
        self._pump()
        return num_removed

    def _was_late(self, action: int) -> bool:
        """Whether an action in flight counts as failed already."""
        flight = self._in_flight
        if self._reads.awaits(action):
            return self._reads.is_late(action)
        if action in flight.writes:
            return flight.writes[action].is_late
        return self._deletes.is_late(action)

    def _expire_action(self, action: int) -> None:
        """Count an overdue action as failed. It stays in flight until the driver reports it."""
        flight = self._in_flight
        if action in flight.writes:
            writing = flight.writes[action]
            if not writing.is_late:
                writing.is_late = True
                self._answer(writing.offer, writing.place, StoreOutcome.LATE)
            if writing.is_written:
                return  # the body was in time
        elif not (self._reads.expire(action) or self._deletes.expire(action)):
            return
        self._counts.faults["overdue"] += 1
        self._note_failure()

    def _note_failure(self) -> None:
        """Count a failure of the body; if the breaker opens, what is queued is answered."""
        if not self._breaker.note_failure(self._now_s):
            return
        self._reads.drop_queue()
        while self._store_queue:
            self._drop_first(StoreOutcome.OUT_OF_SERVICE)

    def _may_send(self) -> bool:
        if self._breaker.state is BreakerState.PROBING:
            return self._num_prompt == 0
        return self._breaker.state is BreakerState.CLOSED

    @property
    def _num_prompt(self) -> int:
        """Actions in flight that are not overdue."""
        writes = sum(not self._was_late(action) for action in self._in_flight.writes)
        return writes + self._reads.num_prompt + self._deletes.num_prompt

    def _pump(self) -> None:
        """Send what may be sent: deletes, then reads, then writes."""
        self._send_deletes()
        self._send_reads()
        self._send_writes()

    def _send_deletes(self) -> None:
        for key in self._deletes.due():
            if not self._may_send():
                return
            action = self._begin_action(self.config.write_timeout_s)
            self._actions.append(self._deletes.begin(action, key, self._now_s + self.config.write_timeout_s))

    def _send_reads(self) -> None:
        while self._reads.can_begin and self._may_send():
            action = self._begin_action(self.config.read_timeout_s)
            self._actions.append(self._reads.begin(action, self._now_s + self.config.read_timeout_s))

    def _send_writes(self) -> None:
        while (
            self._store_queue
            and len(self._in_flight.writes) < self.config.max_writes
            and self._now_s >= self._writes_from_s
            and self._may_send()
        ):
            offer, place = self._store_queue[0]
            key, nbytes = self._offers[offer].keys[place], self._offers[offer].sizes[place]
            outcome = self._outcome_of_scan(key)
            if outcome is not None:
                self._drop_first(outcome)
                continue
            if not self._entries.has_room(nbytes):
                self._entries.make_room(nbytes)
                self._send_deletes()
                if self._room.left_nbytes < nbytes and self._deletes:
                    return  # room comes when deletes are completed
                if not self._entries.has_room(nbytes):
                    self._drop_first(StoreOutcome.NO_ROOM)
                    continue
            self._store_queue.popleft()
            self._unqueue(offer, place)
            self._send_write(offer, place, nbytes)

    def _send_write(self, offer: int, place: int, nbytes: int) -> None:
        offered = self._offers[offer]
        key, parent = offered.keys[place], offered.keys[place - 1] if place else offered.parent
        entry = self._entries.take(key, nbytes)
        action = self._begin_action(self.config.write_timeout_s)
        self._writing[key] = action
        self._in_flight.writes[action] = Writing(key, parent, entry, nbytes, offer, place)
        self._actions.append(Write(action, key, nbytes, offer, place, self._now_s + self.config.write_timeout_s))

    def _begin_action(self, timeout_s: float) -> int:
        action = self._deadlines.take_number()
        self._deadlines.add(action, self._now_s + timeout_s)
        return action
