"""The store core: it decides what a tier stores, loads, deletes and refuses. A driver carries its actions out.

No thread, no clock, no I/O: times are the caller's, actions leave by :meth:`StoreCore.take_actions`, results return by
:meth:`~StoreCore.completed` and :meth:`~StoreCore.failed`, and answers to callers leave by
:meth:`~StoreCore.take_answers`. So threads drive it, and a simulation drives the same code on a virtual clock::

    load ---> reads queued --> Read in flight ---> completed | failed | late ----> Loaded: the longest leading run
    offer --> admission --> stores queued --> room? --> Write in flight ---------> Offered: the outcome of each key
                                       evicted --> Delete in flight --> bytes are free

Each part owns its state, and this class wires the parts. ``Entries`` has the index, bytes, events and deletes,
``Reads`` loads and reads, ``Offers`` offers and their queue, ``Writes`` the writes in flight. ``Dispatch`` sends
actions and takes their results. ``Deadlines`` has the times at which loads, offers and actions are due.

Invariants (:meth:`~StoreCore.check`):

- Every load has an answer by its deadline, and every key of an offer has one.
- The bytes of entries, writes, deletes and the root's foreign bytes are within the cap. A write counts before it
  begins; a delete until it is completed; a write that failed until its delete is.
- At most one read of a key is in flight, which all loads of that key share.
- An entry with a read in flight, or with a load or an offer that waits, is not evicted.

Deletes are sent first, since they make room, then reads, since requests wait for them, then writes. The circuit breaker
decides whether anything is sent at all. An overdue action counts as one failure, and stays in flight until the driver
reports it; its end tells nothing of the body. Nor does a delete that succeeds: where all is gone, deletes do.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.entries import LARGEST_ENTRY, Deletes, Entries
from pagedkv.tiers.index import NO_ENTRY
from pagedkv.tiers.offers import Offers
from pagedkv.tiers.reads import Reads
from pagedkv.tiers.timing import BreakerState, CircuitBreaker, Deadlines, SteadyClock
from pagedkv.tiers.words import (
    ZERO_KEY,
    Action,
    Answer,
    Fault,
    LoadEnd,
    StoreConfig,
    StoreEventKind,
    StoreEvents,
    StoreOutcome,
    as_keys,
    names_of,
    words_of,
)
from pagedkv.tiers.writes import Writes


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A store at one moment; counts are since it was built.

    Args:
        num_entries: entries that can be loaded.
        nbytes: bytes of all entries, those being written or deleted and foreign ones included.
        foreign_nbytes: of these, bytes of the root that are no entries of this store.
        num_reads, num_writes, num_deletes: actions in flight.
        num_waiting: loads without an answer.
        num_queued: offered entries that wait to be written.
        num_asked: keys of all loads.
        num_loaded: of these, loaded and verified.
        num_not_loaded: of these, not loaded, by the cause that ended their load.
        num_coalesced: keys whose read was shared with an earlier load.
        num_offered: keys offered.
        offers: of these, by what became of them; the rest is queued or being written.
        read_nbytes, written_nbytes: bytes of completed actions.
        num_evicted: entries evicted for room.
        num_found: entries of other processes that scans have found while the store ran.
        num_vanished: entries that other processes, or the body, have removed meanwhile.
        faults: failed actions by fault.
        breaker: state of the circuit breaker.
        times_opened: how often it opened.
        index_nbytes: bytes of the bookkeeping.
        cap_nbytes: most bytes, as set.
    """

    num_entries: int
    nbytes: int
    foreign_nbytes: int
    num_reads: int
    num_writes: int
    num_deletes: int
    num_waiting: int
    num_queued: int
    num_asked: int
    num_loaded: int
    num_not_loaded: dict[LoadEnd, int]
    num_coalesced: int
    num_offered: int
    offers: dict[StoreOutcome, int]
    read_nbytes: int
    written_nbytes: int
    num_evicted: int
    num_found: int
    num_vanished: int
    faults: dict[str, int]
    breaker: BreakerState
    times_opened: int
    index_nbytes: int
    cap_nbytes: int


class StoreCore:
    """The decisions of one store.

    Args:
        config: its settings.
        now_s: the caller's clock.
    """

    def __init__(self, config: StoreConfig, now_s: float = 0.0) -> None:
        """Build an empty store. O(max_entries)."""
        self.config = config
        self._clock = SteadyClock()
        self._clock.advance(now_s)
        self._deadlines = Deadlines()
        self._answers: list[Answer] = []
        self._breaker = CircuitBreaker(config.breaker_failures, config.breaker_pause_s, config.breaker_longest_pause_s)
        self._entries = Entries(config, self._clock)
        self._reads = Reads(config, self._clock, self._entries, self._breaker, self._answers.append)
        self._offers = Offers(config, self._entries, self._breaker, self._answers.append)
        self._writes = Writes(config, self._clock, self._entries, self._offers)
        self._dispatch = Dispatch(self._deadlines, self._breaker, self._reads, self._writes, self._entries.deletes)

    def look_up(self, keys: npt.NDArray[np.uint8]) -> int:
        """Count the leading keys, uint8 ``[n, 32]``, that can be loaded. O(keys). Changes nothing."""
        if self._breaker.is_open:
            return 0
        return self._entries.index.look_up(words_of(as_keys(keys)))[1]

    @property
    def breaker(self) -> BreakerState:
        """State of the circuit breaker."""
        return self._breaker.state

    @property
    def num_lost(self) -> int:
        """Offered keys that were to be stored and were not."""
        return self._offers.num_lost

    @property
    def queue_room_nbytes(self) -> int:
        """Bytes that can be offered now before offers are dropped."""
        return self._offers.queue_room_nbytes

    def sizes_of(self, keys: npt.NDArray[np.uint8]) -> list[int]:
        """Return the bytes of each key's entry; 0 where there is none. O(keys). Changes nothing."""
        found = [self._entries.index.find(name) for name in names_of(as_keys(keys))]
        return [0 if entry == NO_ENTRY else self._entries.index.size_of(entry) for entry in found]

    def contains(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return, for each key, uint8 ``[n, 32]``, whether its entry can be loaded. O(keys). Changes nothing."""
        if self._breaker.is_open:
            return np.zeros(len(keys), np.bool_)
        entries, _ = self._entries.index.look_up(words_of(as_keys(keys)))
        return np.asarray(entries != NO_ENTRY)

    def select_for_offer(self, keys: npt.NDArray[np.uint8], now_s: float, salt: bytes = b"") -> npt.NDArray[np.bool_]:
        """Note content that could be offered; return for each key, uint8 ``[n, 32]``, whether to offer it now.

        Content is not to be offered if it is stored, queued, being written or deleted, withdrawn, not admitted yet, or
        if the body is out of service. Stored content counts as used. For the others :meth:`offer` with ``is_noted``
        follows.
        """
        keys = as_keys(keys)
        self.tick(now_s)
        return self._offers.select_for_offer(keys, self._writes.keys, salt)

    def predict_s(self, nbytes: int, num_entries: int) -> float | None:
        """Predict the seconds to load so much, by the reads so far; None before the first. Changes nothing."""
        return self._reads.predict_s(nbytes, num_entries)

    def load(self, keys: npt.NDArray[np.uint8], now_s: float, deadline_s: float) -> int:
        """Begin to load the entries of a chain, head first; return a ticket, which :class:`Loaded` answers.

        Args:
            keys: uint8 ``[n, 32]``.
            now_s: the caller's clock.
            deadline_s: seconds from now after which the load is answered with the entries read by then.

        Raises:
            ConfigurationError: keys of another shape, or a deadline that is not above 0.
        """
        keys = as_keys(keys)
        if not deadline_s > 0:
            raise ConfigurationError(f"the deadline of a load must be above 0 seconds, got {deadline_s}")
        self.tick(now_s)
        ticket = self._deadlines.take_number()
        self._deadlines.add(ticket, self.now_s + deadline_s)
        self._reads.load(ticket, keys)
        self._dispatch.send()
        return ticket

    def cancel(self, ticket: int) -> None:
        """End a load whose request is gone, and answer it with the entries read so far. Other loads go on."""
        self._reads.end_load(ticket)

    def offer(  # noqa: PLR0913 - a chain, and what is known of it
        self,
        keys: npt.NDArray[np.uint8],
        sizes: list[int],
        now_s: float,
        parent: bytes = ZERO_KEY,
        *,
        is_noted: bool = False,
        salt: bytes = b"",
    ) -> int:
        """Offer the content of a chain, head first; return the offer's number. :class:`Offered` answers each key.

        Args:
            keys: uint8 ``[n, 32]``, no key twice.
            sizes: bytes of each frame.
            now_s: the caller's clock.
            parent: key of the entry before the first one, if it is known.
            is_noted: :meth:`select_for_offer` has returned True for these keys, so they are admitted.
            salt: of the tenant to which the content is charged; empty: to none.

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
        number = self._deadlines.take_number()
        if len(keys):
            self._deadlines.add(number, self.now_s + self.config.write_timeout_s)
        self._offers.offer(number, keys, sizes, bytes(parent), self._writes.keys, is_noted=is_noted, salt=salt)
        self._dispatch.send()
        return number

    def drop_queue(self, now_s: float) -> None:
        """Drop all offered content that waits, as when its blocks are needed. Writes in flight go on."""
        self.tick(now_s)
        self._offers.drop_queue(StoreOutcome.LATE)

    def withdraw(self, keys: npt.NDArray[np.uint8], now_s: float) -> int:
        """Remove entries whose content turned out bad, and all that are known to continue them.

        They are deleted, and neither loaded nor stored again while this core exists. Loads that wait for one end before
        it. Returns the number of entries removed. O(entries).
        """
        self.tick(now_s)
        names = self._with_continuations(set(names_of(as_keys(keys))))
        self._entries.forbid(names)
        return self._forget(names)

    def reset(self, now_s: float) -> int:
        """Remove all entries, as after new weights. Returns how many."""
        self.tick(now_s)
        self._reads.withdraw_all()
        removed = self._forget(self._entries.keys().union(self._offers.queued_keys, self._writes.keys))
        self._entries.forget_scans()
        self._entries.events.note(StoreEventKind.CLEARED)
        return removed

    def restore(self, keys: npt.NDArray[np.uint8], sizes: list[int], now_s: float) -> int:
        """Add the entries that a scan found, the least recently used first; beyond the limits the oldest are deleted.

        Keys that are stored, being written or being deleted are left as they are. Returns the number of added entries.
        """
        self.tick(now_s)
        names = names_of(as_keys(keys))
        found = zip(names, sizes, strict=True)
        num_entered = self._entries.restore([each for each in found if each[0] not in self._writes.keys])
        self._dispatch.send()
        return num_entered

    def begin_scan(self) -> None:
        """Begin to compare the entries with a scan of the body, which other processes write to. O(max_entries).

        A scan that is open is given up, as by :meth:`reset`. It is ended by :meth:`end_scan`, after calls of
        :meth:`compare_scan` for all that it lists, of :meth:`lose_vanished` and of :meth:`adopt`. Between these calls
        anything else may happen to the store.
        """
        self._entries.begin_scan()

    def compare_scan(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Take keys, uint8 ``[n, 32]``, that the open scan lists; return which of them have no entry. O(keys)."""
        return self._entries.compare_scan(words_of(as_keys(keys)))

    def lose_vanished(self, most: int) -> bool:
        """Remove entries that the whole scan has not listed, among the next ``most`` of the index. O(most).

        Returns whether there are more to be looked at.
        """
        return self._entries.lose_vanished(most)

    def adopt(self, keys: npt.NDArray[np.uint8], sizes: list[int], now_s: float) -> int:
        """List entries of other processes, which :meth:`compare_scan` did not know, the least recently used first.

        Nothing is evicted for them. What is withdrawn, is being written, or was removed since the scan began, is left
        out. The first scan after a reset deletes what it finds. Returns how many entries are listed. O(keys).
        """
        self.tick(now_s)
        found = zip(names_of(as_keys(keys)), sizes, strict=True)
        num_listed = self._entries.adopt([each for each in found if each[0] not in self._writes.keys])
        self._dispatch.send()
        return num_listed

    def end_scan(self, *, is_whole: bool) -> None:
        """End the open scan, if there is one; ``is_whole``: it has listed all that is there."""
        self._entries.end_scan(is_whole=is_whole)

    def measured(self, root_nbytes: int, free_nbytes: int | None, now_s: float) -> None:
        """Set the measured bytes of a body: all bytes of its root, and the free bytes of its medium (None: unknown).

        Bytes of the root that are not this store's count as foreign.
        """
        self.tick(now_s)
        self._entries.measure(root_nbytes, free_nbytes, self._writes.nbytes)  # at most: what landed is not known
        self._dispatch.send()

    def completed(self, action: int, now_s: float, nbytes: int | None = None) -> None:
        """Report that an action is done: a read whose frame is verified, a write, each of ``nbytes``, or a delete.

        A write may have fewer bytes than were offered.
        """
        self._dispatch.require_awaited(action)
        self.tick(now_s)
        self._dispatch.complete(action, nbytes)

    def failed(self, action: int, fault: Fault, now_s: float) -> None:
        """Report that an action failed and that none of its bytes can land any more."""
        self._dispatch.require_awaited(action)
        self.tick(now_s)
        self._dispatch.fail(action, fault, self.now_s)

    def tick(self, now_s: float) -> None:
        """Advance the clock, and end loads, offers and actions whose deadlines have passed. O(overdue)."""
        now_s = self._clock.advance(now_s)
        self._entries.index.advance(now_s)
        while (number := self._deadlines.pop_overdue(now_s)) is not None:
            if not (self._reads.end_load(number) or self._offers.expire(number)):
                self._dispatch.expire(number, now_s)
        self._breaker.advance(now_s)
        self._dispatch.send()

    def next_deadline_s(self) -> float | None:
        """Return the seconds until :meth:`tick` has the next thing to do; None if there is none. Changes nothing."""
        opens_again_s = self._breaker.opens_again_s if self._breaker.is_open else None
        retries_s = (self._writes.next_retry_s(), self._entries.deletes.next_retry_s())
        times = [each for each in (self._deadlines.first_s, opens_again_s, *retries_s) if each is not None]
        return max(0.0, min(times) - self.now_s) if times else None

    def take_actions(self) -> list[Action]:
        """Take the actions since the last call, to be carried out in any order."""
        return self._dispatch.take_actions()

    def take_answers(self) -> list[Answer]:
        """Take the answers since the last call."""
        answers = self._answers.copy()
        self._answers.clear()  # the same list: reads and offers append to it
        return answers

    def drain_events(self) -> StoreEvents:
        """Take the events since the last call."""
        return self._entries.events.drain()

    @property
    def now_s(self) -> float:
        """The steady clock, by which the deadlines of actions are given."""
        return self._clock.now_s

    def statistics(self) -> StoreStatistics:
        """Take a snapshot. Changes nothing."""
        reads, writes, offers, room = self._reads, self._writes, self._offers, self._entries.room
        return StoreStatistics(
            num_entries=len(self._entries.index),
            nbytes=room.nbytes + room.foreign_nbytes,
            foreign_nbytes=room.foreign_nbytes,
            num_reads=reads.num_in_flight,
            num_writes=writes.num_in_flight,
            num_deletes=self._entries.deletes.num_in_flight,
            num_waiting=reads.num_waiting,
            num_queued=offers.num_queued,
            num_asked=reads.num_asked,
            num_loaded=reads.num_loaded,
            num_not_loaded=dict(reads.not_loaded),
            num_coalesced=reads.num_coalesced,
            num_offered=offers.num_offered,
            offers=dict(offers.outcomes),
            read_nbytes=reads.read_nbytes,
            written_nbytes=writes.written_nbytes,
            num_evicted=self._entries.num_evicted,
            num_found=self._entries.num_found,
            num_vanished=self._entries.num_vanished,
            faults=dict(self._dispatch.faults),
            breaker=self._breaker.state,
            times_opened=self._breaker.times_opened,
            index_nbytes=self._entries.index.nbytes + offers.admission_nbytes + self._entries.owners.nbytes,
            cap_nbytes=self.config.cap_nbytes,
        )

    def check(self) -> None:
        """Check every invariant. Raises AssertionError. O(entries)."""
        self._entries.check(self._writes.nbytes)
        self._reads.check()
        self._writes.check()
        self._offers.check(self._writes.unanswered())

    def _with_continuations(self, keys: set[bytes]) -> set[bytes]:
        """Return these keys with all that continue them, among entries and offers under way."""
        num_before = -1
        while len(keys) > num_before:
            num_before = len(keys)
            keys = keys | self._entries.continuing(keys)
            keys = keys | self._offers.continuing(keys)
        return keys

    def _forget(self, keys: set[bytes]) -> int:
        """Remove entries by key, and end the loads, offers and writes of them; return the number removed."""
        self._reads.withdraw(keys)
        self._offers.withdraw(keys)
        self._writes.withdraw(keys)
        num_removed = self._entries.remove_all(keys)
        self._dispatch.send()
        return num_removed


BREAKING: Final = frozenset({Fault.TIMEOUT, Fault.IO})


class Dispatch:
    """The actions of one store, out and in.

    Args:
        deadlines: numbers the actions, and has when each is due.
        breaker: counts failures, and stops sending while it is open.
        reads, writes, deletes: what is to be done, and what is in flight.
    """

    def __init__(
        self, deadlines: Deadlines, breaker: CircuitBreaker, reads: Reads, writes: Writes, deletes: Deletes
    ) -> None:
        self._deadlines = deadlines
        self._breaker = breaker
        self._reads = reads
        self._writes = writes
        self._deletes = deletes
        self._actions: list[Action] = []
        self.faults: Counter[str] = Counter()

    def take_actions(self) -> list[Action]:
        """Take the actions since the last call, to be carried out in any order."""
        actions, self._actions = self._actions, []
        return actions

    def send(self) -> None:
        """Send what may be sent: deletes, then reads, then writes."""
        self._send_deletes()
        self._send_reads()
        self._send_writes()

    def require_awaited(self, action: int) -> None:
        """Raise ConfigurationError unless the end of an action is still to be reported. Changes nothing."""
        if self._owner_of(action) is None:
            raise ConfigurationError(f"action {action} is not in flight: it was reported before, or is another store's")

    def complete(self, action: int, nbytes: int | None) -> None:
        """End an action that is done. A read that brought another frame than the index counts is corrupt."""
        self._note_success(action)
        if nbytes is not None:
            self._writes.landed(action, nbytes)
        fault = Fault.CORRUPT if self._reads.is_another_frame(action, nbytes) else None
        if fault is not None:
            self.faults[str(fault)] += 1
        self._end(action, fault)

    def fail(self, action: int, fault: Fault, now_s: float) -> None:
        """End an action that failed. What is overdue has counted as a failure of the body already."""
        self.faults[str(fault)] += 1
        if fault not in BREAKING:
            self._note_success(action)
        elif not self._awaiting(action).is_late(action):
            self._note_failure(action, now_s, hangs=fault is Fault.TIMEOUT)
        self._end(action, fault)

    def expire(self, action: int, now_s: float) -> None:
        """Count an overdue action as failed, if it is in flight. It stays so until the driver reports it."""
        if self._owner_of(action) is not None:
            self.faults["overdue"] += 1
            self._note_failure(action, now_s, hangs=True)
        for owner in (self._reads, self._writes, self._deletes):
            owner.expire(action)

    def _owner_of(self, action: int) -> Reads | Writes | Deletes | None:
        """Return what awaits the end of an action; None if nothing does."""
        owners = (self._reads, self._writes, self._deletes)
        return next((owner for owner in owners if owner.awaits(action)), None)

    def _awaiting(self, action: int) -> Reads | Writes | Deletes:
        owner = self._owner_of(action)
        assert owner is not None, f"action {action} is not in flight"
        return owner

    def _end(self, action: int, fault: Fault | None) -> None:
        self._awaiting(action).end(action, fault)
        self.send()

    def _note_success(self, action: int) -> None:
        """Count what the body did in time, if it tells that the body works."""
        owner = self._awaiting(action)
        if owner is self._deletes or owner.is_late(action):
            return
        self._breaker.note_success(self._reads.seconds_of(action) if owner is self._reads else None)

    def _note_failure(self, action: int, now_s: float, *, hangs: bool) -> None:
        """Count a failure of the body; if the breaker opens, what is queued is answered."""
        owner = self._awaiting(action)
        if owner is self._deletes and self._breaker.state is BreakerState.PROBING:
            return  # content that cannot be deleted would keep the tier out of service
        read_s = self._reads.seconds_of(action) if hangs and owner is self._reads else None
        if self._breaker.note_failure((type(owner).__name__, owner.key_of(action)), now_s, read_s):
            self._reads.drop_queue()
            self._writes.drop_queue()

    def _may_send(self) -> bool:
        if self._breaker.state is BreakerState.PROBING:
            return self._reads.num_prompt + self._writes.num_prompt == 0
        return self._breaker.state is BreakerState.CLOSED

    def _may_delete(self) -> bool:
        if self._breaker.state is BreakerState.PROBING:
            return self._deletes.num_prompt == 0
        return self._breaker.state is BreakerState.CLOSED

    def _send_deletes(self) -> None:
        for key in self._deletes.due():
            if not self._may_delete():
                return
            self._send(self._deletes.begin(self._deadlines.take_number(), key))

    def _send_reads(self) -> None:
        while self._reads.can_begin and self._may_send():
            self._send(self._reads.begin(self._deadlines.take_number()))

    def _send_writes(self) -> None:
        while self._writes.can_begin and self._may_send():
            if self._writes.drop_found():
                continue
            if not self._writes.make_share():
                self._writes.drop_for_room()
                continue
            if not self._writes.has_room:
                self._writes.make_room()
                self._send_deletes()
            if self._writes.has_room:
                self._send(self._writes.begin(self._deadlines.take_number()))
            elif self._writes.waits_for_deletes:
                return
            else:
                self._writes.drop_for_room()

    def _send(self, action: Action) -> None:
        self._deadlines.add(action.action, action.deadline_s)
        self._actions.append(action)
