"""The writes of a store: content in flight to the body, until it is an entry.

A write that succeeded waits for the write of the entry that it continues, so that the index links the two. A failed
write may have left bytes, so it is followed by a delete. After a write found the medium full, writes pause, each time
longer, and entries of its size are evicted: once, until a write succeeds. Where that made no room, others have taken
it, or the medium is full in another way, and more evictions would only empty the store.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from pagedkv.tiers.entries import Entries
from pagedkv.tiers.offers import Content, Offers
from pagedkv.tiers.timing import SteadyClock
from pagedkv.tiers.words import Fault, StoreConfig, StoreOutcome, Write


@dataclass(slots=True)
class Writing:
    """A write in flight. One that ``is_written`` succeeded and waits for the write of its parent to end.

    Args:
        content: the content.
        entry: its entry of the index, not published yet.
        is_late: whether it was overdue, and its offer is answered.
        is_doomed: whether its key was withdrawn.
    """

    content: Content
    entry: int
    is_late: bool = False
    is_doomed: bool = False
    is_written: bool = False


class Writes:
    """Writes in flight, by action and by key.

    Args:
        config: most writes in flight, their time limit, and the pause after a full medium.
        clock: the store's clock.
        entries: the entries of the store.
        offers: have the queue, and answer the written keys.
    """

    def __init__(self, config: StoreConfig, clock: SteadyClock, entries: Entries, offers: Offers) -> None:
        self._config = config
        self._clock = clock
        self._entries = entries
        self._offers = offers
        self._in_flight: dict[int, Writing] = {}
        self._action_of: dict[bytes, int] = {}
        self._paused_until_s = 0.0
        self._pause_s = 0.0
        self._given_up_nbytes = 0
        self.written_nbytes = 0

    @property
    def keys(self) -> Collection[bytes]:
        """The keys that are being written."""
        return self._action_of.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of the writes in flight. O(writes in flight)."""
        return sum(each.content.nbytes for each in self._in_flight.values())

    @property
    def num_in_flight(self) -> int:
        """Writes in flight."""
        return len(self._in_flight)

    @property
    def num_prompt(self) -> int:
        """Writes in flight that are not overdue. O(writes in flight)."""
        return sum(not each.is_late for each in self._in_flight.values())

    @property
    def can_begin(self) -> bool:
        """Whether content is queued, and another write may be in flight."""
        has_slot = len(self._in_flight) < self._config.max_writes
        return has_slot and self._offers.num_queued > 0 and self._clock.now_s >= self._paused_until_s

    @property
    def has_room(self) -> bool:
        """Whether there is room for the oldest queued content. The queue must not be empty."""
        return self._entries.has_room(self._offers.first().nbytes)

    @property
    def waits_for_deletes(self) -> bool:
        """Whether the oldest queued content lacks bytes that deletes will free. The queue must not be empty."""
        lacks_bytes = self._entries.room.left_nbytes < self._offers.first().nbytes
        return lacks_bytes and len(self._entries.deletes) > 0

    def make_share(self) -> bool:
        """Evict entries of the salt of the oldest queued content, until it is within its share; return whether it is.

        The queue must not be empty.
        """
        first = self._offers.first()
        return self._entries.evict_own(first.salt, first.nbytes)

    def make_room(self) -> None:
        """Evict entries for the oldest queued content. The queue must not be empty."""
        self._entries.make_room(self._offers.first().nbytes)

    def drop_found(self) -> bool:
        """Drop the oldest queued content if a scan has found it since; return whether it was dropped."""
        outcome = self._offers.outcome_of_scan(self._offers.first().key)
        if outcome is not None:
            self._offers.drop_first(outcome)
        return outcome is not None

    def drop_for_room(self) -> None:
        """Drop the oldest queued content, since there is no room for it. The queue must not be empty."""
        self._offers.drop_first(StoreOutcome.NO_ROOM)

    def drop_queue(self) -> None:
        """Drop all queued content, since the body is out of service. Writes in flight go on."""
        self._offers.drop_queue(StoreOutcome.OUT_OF_SERVICE)

    def next_retry_s(self) -> float | None:
        """Return when the pause of a full medium ends, for which content waits; None if none does. Changes nothing."""
        is_waiting = self._offers.num_queued and self._paused_until_s > self._clock.now_s
        return self._paused_until_s if is_waiting else None

    def begin(self, action: int) -> Write:
        """Begin to write the oldest queued content. There must be room for it."""
        content = self._offers.take_first()
        self._in_flight[action] = Writing(content, self._entries.take(content.key, content.nbytes, content.salt))
        self._action_of[content.key] = action
        deadline_s = self._clock.now_s + self._config.write_timeout_s
        return Write(action, content.key, content.nbytes, content.offer, content.place, deadline_s)

    def awaits(self, action: int) -> bool:
        """Whether a write of this number is in flight, and the body has not ended it."""
        return action in self._in_flight and not self._in_flight[action].is_written

    def key_of(self, action: int) -> bytes:
        """Return the key of a write in flight."""
        return self._in_flight[action].content.key

    def is_late(self, action: int) -> bool:
        """Whether a write in flight is overdue."""
        return self._in_flight[action].is_late

    def expire(self, action: int) -> None:
        """Note that an action is overdue, if it is a write in flight, and answer its offer."""
        writing = self._in_flight.get(action)
        if writing is not None:
            writing.is_late = True
            self._offers.answer(writing.content.offer, writing.content.place, StoreOutcome.LATE)

    def withdraw(self, keys: set[bytes]) -> None:
        """Mark the writes of these keys, so that they do not become entries."""
        for key in keys & self._action_of.keys():
            self._in_flight[self._action_of[key]].is_doomed = True

    def landed(self, action: int, nbytes: int) -> None:
        """Note the bytes of a write that succeeded, if the action is one and they are fewer than were offered."""
        writing = self._in_flight.get(action)
        if writing is not None and nbytes < writing.content.nbytes:
            self._entries.shrink(writing.entry, nbytes)
            writing.content = replace(writing.content, nbytes=nbytes)

    def end(self, action: int, fault: Fault | None) -> None:
        """End a write, and those that succeeded earlier and waited for it. O(writes in flight)."""
        writing = self._in_flight[action]
        writing.is_written = fault is None
        if fault is None:
            self._pause_s, self._given_up_nbytes = 0.0, 0
        if self._waits_for_parent(writing):
            return
        self._settle(action, fault)
        while (ready := self._first_to_settle()) is not None:
            self._settle(ready, None)

    def unanswered(self) -> Iterator[Content]:
        """Iterate over content that is being written and has no answer."""
        return (each.content for each in self._in_flight.values() if not each.is_late)

    def check(self) -> None:
        """Check the writes by key. Raises AssertionError."""
        assert len(self._in_flight) <= self._config.max_writes
        assert {each.content.key: action for action, each in self._in_flight.items()} == self._action_of

    def _give_way(self, nbytes: int) -> None:
        """Pause writes, and evict so many bytes, less those evicted since the last write that succeeded."""
        config = self._config
        longest_s = max(config.full_pause_s, config.breaker_longest_pause_s)
        self._pause_s = min(longest_s, max(config.full_pause_s, 2 * self._pause_s))
        self._paused_until_s = self._clock.now_s + self._pause_s
        self._given_up_nbytes += self._entries.evict(nbytes - self._given_up_nbytes)

    def _first_to_settle(self) -> int | None:
        writes = self._in_flight.items()
        return next(
            (each for each, writing in writes if writing.is_written and not self._waits_for_parent(writing)), None
        )

    def _waits_for_parent(self, writing: Writing) -> bool:
        """Whether a write that succeeded waits for that of its parent, so that the index links the two entries.

        Keys that claim to continue each other do not wait.
        """
        is_behind = writing.content.parent in self._action_of
        if not is_behind or not writing.is_written or writing.is_late or writing.is_doomed:
            return False
        above = writing
        for _ in self._in_flight:
            if above.content.parent not in self._action_of:
                return True
            above = self._in_flight[self._action_of[above.content.parent]]
            if not above.is_written:
                return True
        return False

    def _settle(self, action: int, fault: Fault | None) -> None:
        """Publish or abandon the entry of a write; answer its offer unless that is done."""
        writing = self._in_flight.pop(action)
        content = writing.content
        del self._action_of[content.key]
        outcome = StoreOutcome.STORED
        if fault is None and not writing.is_doomed:
            self.written_nbytes += content.nbytes
            self._entries.publish(writing.entry, self._entries.index.find(content.parent))
            if writing.is_late:
                self._entries.index.let_go(writing.entry)
            else:
                self._offers.hold(content, writing.entry)
        else:
            self._entries.abandon(writing.entry)
            if fault is Fault.FULL:
                self._give_way(content.nbytes)
            full = StoreOutcome.NO_ROOM if fault is Fault.FULL else StoreOutcome.FAILED
            outcome = StoreOutcome.WITHDRAWN if fault is None else full
        if not writing.is_late:
            self._offers.answer(content.offer, content.place, outcome)
