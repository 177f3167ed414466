"""The offers of a store: the admission of content, the queue of content to be written, the outcome of each key.

::

    offer --> an outcome at once: present, not admitted, busy, ...
         +--> the queue --> taken to be written --> answered when its write ends
                       +--> dropped: late, no room, out of service, withdrawn

Every key of an offer has one answer. An offer holds its entries until all its keys have one, and then releases them
tail first.

*Admission by second offer* stores content when it is offered for the second time. Most blocks of a trace never recur,
so a store that wrote all of them would wear its disk in vain. The table has 16-bit fragments of the keys that were
offered once, in sets of eight, the latest first; a new fragment replaces the oldest of its set. In one of 8,000 offers
a fragment matches by accident, and an entry is stored at its first offer. Hits do not depend on the table.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tiers.entries import Entries
from pagedkv.tiers.index import NO_ENTRY
from pagedkv.tiers.timing import CircuitBreaker
from pagedkv.tiers.words import Answer, Offered, StoreConfig, StoreOutcome, names_of, words_of

LOST: Final = frozenset(
    {StoreOutcome.BUSY, StoreOutcome.NO_ROOM, StoreOutcome.LATE, StoreOutcome.FAILED, StoreOutcome.OUT_OF_SERVICE}
)
"""Outcomes of content that was to be stored, and was not."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of one entry.

    Args:
        key: key of the entry.
        parent: key of the entry that it continues.
        nbytes: bytes of its frame.
        offer, place: number of its offer, and its place among the offer's keys.
        salt: of its tenant.
    """

    key: bytes
    parent: bytes
    nbytes: int
    offer: int
    place: int
    salt: bytes = b""


@dataclass(slots=True)
class Offer:
    """An offer: the entries that it holds by place, and how many of its keys have no answer yet."""

    keys: list[bytes]
    parent: bytes
    held: npt.NDArray[np.int32]
    num_open: int


class Offers:
    """Offers by number, and the queue of content to be written, by key.

    Args:
        config: admission, and the caps of the store and of the queue.
        entries: the entries of the store.
        breaker: while it is open, nothing is queued.
        answer: called with the outcome of each key.
    """

    def __init__(
        self, config: StoreConfig, entries: Entries, breaker: CircuitBreaker, answer: Callable[[Answer], None]
    ) -> None:
        self._config = config
        self._breaker = breaker
        self._entries = entries
        self._index = entries.index
        self._answer = answer
        self._offered_once = OfferedOnce(config.max_entries) if config.admission == "second-offer" else None
        self._offers: dict[int, Offer] = {}
        self._queue: OrderedDict[bytes, Content] = OrderedDict()
        self._queued_nbytes = 0
        self.num_offered = 0
        self.outcomes: Counter[StoreOutcome] = Counter()

    @property
    def num_queued(self) -> int:
        """Keys that wait to be written."""
        return len(self._queue)

    @property
    def num_lost(self) -> int:
        """Offered keys that were to be stored and were not."""
        return sum(self.outcomes[outcome] for outcome in LOST)

    @property
    def queued_keys(self) -> Collection[bytes]:
        """The keys that wait to be written."""
        return self._queue.keys()

    @property
    def queue_room_nbytes(self) -> int:
        """Bytes that can be offered now before offers are dropped."""
        return max(0, self._config.max_queued_nbytes - self._queued_nbytes)

    @property
    def admission_nbytes(self) -> int:
        """Bytes of the table of offers."""
        return 0 if self._offered_once is None else self._offered_once.nbytes

    def select_for_offer(
        self, keys: npt.NDArray[np.uint8], being_written: Collection[bytes], salt: bytes
    ) -> npt.NDArray[np.bool_]:
        """Note content that could be offered; return for each key whether to offer it. Stored entries count as used."""
        words = words_of(keys)
        entries, _ = self._index.look_up(words)
        is_there = np.asarray(entries != NO_ENTRY)
        self._claim(entries[is_there], salt)
        self._index.use(entries[is_there])
        self._index.let_go_chain(entries[is_there])
        admitted = self._admit(words)
        outcomes = (
            self._outcome_at_once(key, 0, salt, being_written, is_there=there, is_admitted=may)
            for key, there, may in zip(names_of(keys), is_there.tolist(), admitted.tolist(), strict=True)
        )
        return np.array([outcome is None for outcome in outcomes], np.bool_)

    def offer(  # noqa: PLR0913 - an offer, its number, and the keys that have left the queue
        self,
        number: int,
        keys: npt.NDArray[np.uint8],
        sizes: list[int],
        parent: bytes,
        being_written: Collection[bytes],
        *,
        is_noted: bool,
        salt: bytes,
    ) -> None:
        """Queue the content of a chain, uint8 ``[n, 32]``, no key twice; answer keys that are not to be written."""
        names, words = names_of(keys), words_of(keys)
        held, _ = self._index.look_up(words)
        self._claim(held[held != NO_ENTRY], salt)
        self._index.use(held[held != NO_ENTRY])
        offer = self._offers[number] = Offer(names, parent, held, len(names))
        self.num_offered += len(names)
        admitted = np.ones(len(names), np.bool_) if is_noted else self._admit(words)
        for place, (key, nbytes, may) in enumerate(zip(names, sizes, admitted.tolist(), strict=True)):
            is_there = bool(held[place] != NO_ENTRY)
            outcome = self._outcome_at_once(key, nbytes, salt, being_written, is_there=is_there, is_admitted=may)
            if outcome is not None:
                self.answer(number, place, outcome)
                continue
            self._queue[key] = Content(key, names[place - 1] if place else parent, nbytes, number, place, salt)
            self._queued_nbytes += nbytes
        if not names:
            self._close(number, offer)

    def first(self) -> Content:
        """Return the oldest content of the queue, which must not be empty. Changes nothing."""
        return next(iter(self._queue.values()))

    def take_first(self) -> Content:
        """Remove the oldest content from the queue, to be written. The queue must not be empty."""
        return self._unqueue(self.first())

    def outcome_of_scan(self, key: bytes) -> StoreOutcome | None:
        """Return the outcome of a queued key that a scan has found since; None if none has."""
        if self._index.find(key) != NO_ENTRY:
            return StoreOutcome.PRESENT
        return StoreOutcome.BUSY if key in self._entries.deletes else None

    def drop_first(self, outcome: StoreOutcome) -> None:
        """Drop the oldest content of the queue, which must not be empty."""
        self._drop([self.first()], outcome)

    def drop_queue(self, outcome: StoreOutcome) -> None:
        """Drop all queued content."""
        self._drop(list(self._queue.values()), outcome)

    def expire(self, number: int) -> bool:
        """Drop the queued content of an offer; return whether there is an offer of this number. O(queue)."""
        if number not in self._offers:
            return False
        self._drop([each for each in self._queue.values() if each.offer == number], StoreOutcome.LATE)
        return True

    def withdraw(self, keys: set[bytes]) -> None:
        """Drop the queued content of these keys. O(queue)."""
        self._drop([each for each in self._queue.values() if each.key in keys], StoreOutcome.WITHDRAWN)

    def hold(self, content: Content, entry: int) -> None:
        """Hold the entry of content that was written; the offer releases it."""
        self._offers[content.offer].held[content.place] = entry

    def answer(self, number: int, place: int, outcome: StoreOutcome) -> None:
        """Answer one key of an offer. The last answer ends the offer."""
        self.outcomes[outcome] += 1
        self._answer(Offered(number, place, outcome))
        offer = self._offers[number]
        offer.num_open -= 1
        if not offer.num_open:
            self._close(number, offer)

    def continuing(self, keys: set[bytes]) -> set[bytes]:
        """Return those of these keys that are offered, with all later keys of their offers. Changes nothing."""
        found: set[bytes] = set()
        for offer in self._offers.values():
            chain = [offer.parent, *offer.keys]
            first = next((place for place, key in enumerate(chain) if key in keys), len(chain))
            found.update(chain[first:])
        return found

    def check(self, being_written: Iterable[Content]) -> None:
        """Check that every key is queued, ``being_written``, or answered. Raises AssertionError."""
        assert self._queued_nbytes == sum(each.nbytes for each in self._queue.values()), "queued bytes miscounted"
        num_open = dict.fromkeys(self._offers, 0)
        for content in (*self._queue.values(), *being_written):
            num_open[content.offer] += 1
        assert num_open == {number: each.num_open for number, each in self._offers.items()}, "open offers miscounted"
        offers = sum(self.outcomes.values()) + sum(num_open.values())
        assert offers == self.num_offered, f"{offers} keys of {self.num_offered} accounted for"

    def _claim(self, entries: Int32Array, salt: bytes) -> None:
        """Charge entries that a scan has found to the salt that offers them."""
        self._entries.owners.claim(entries, self._index.sizes_of(entries), salt)

    def _admit(self, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Note an offer of these keys, and return which are admitted."""
        return np.ones(len(words), np.bool_) if self._offered_once is None else self._offered_once.note(words)

    def _outcome_at_once(  # noqa: PLR0913 - what is offered, and what is known of it
        self,
        key: bytes,
        nbytes: int,
        salt: bytes,
        being_written: Collection[bytes],
        *,
        is_there: bool,
        is_admitted: bool,
    ) -> StoreOutcome | None:
        """Return the outcome of an offered key that is not to be written; None if it is to be written."""
        outcome = None
        if is_there or key in being_written or key in self._queue:
            outcome = StoreOutcome.PRESENT
        elif self._entries.is_forbidden(key):
            outcome = StoreOutcome.WITHDRAWN
        elif self._breaker.is_open:
            outcome = StoreOutcome.OUT_OF_SERVICE
        elif not is_admitted:
            outcome = StoreOutcome.NOT_ADMITTED
        elif nbytes > self._entries.owners.most_nbytes(salt):
            outcome = StoreOutcome.NO_ROOM
        elif key in self._entries.deletes or self._queued_nbytes + nbytes > self._config.max_queued_nbytes:
            outcome = StoreOutcome.BUSY
        return outcome

    def _drop(self, contents: list[Content], outcome: StoreOutcome) -> None:
        for content in contents:
            self._unqueue(content)
            self.answer(content.offer, content.place, outcome)

    def _unqueue(self, content: Content) -> Content:
        del self._queue[content.key]
        self._queued_nbytes -= content.nbytes
        return content

    def _close(self, number: int, offer: Offer) -> None:
        del self._offers[number]
        self._index.let_go_chain(offer.held[offer.held != NO_ENTRY])


WAYS: Final = 8
FRAGMENT_MASK: Final = 0xFFFF
SPREAD: Final = 0x9E3779B1
WORD: Final = 2**32 - 1
WORD_BITS: Final = 32


@compiled
def _note_offers(table: npt.NDArray[np.uint16], keys: Uint32Array, was_offered: npt.NDArray[np.uint8]) -> None:
    """Record the keys, and write to ``was_offered`` which of them the table had before."""
    for place in range(len(keys)):
        mixed = ((int(keys[place, 0]) ^ int(keys[place, 2])) * SPREAD) & WORD
        row = (mixed * len(table)) >> WORD_BITS
        fragment = (int(keys[place, 1]) ^ int(keys[place, 3])) & FRAGMENT_MASK
        if fragment == 0:
            fragment = 1
        way = 0
        while way < WAYS - 1 and table[row, way] != fragment:
            way += 1
        was_offered[place] = table[row, way] == fragment
        while way > 0:
            table[row, way] = table[row, way - 1]
            way -= 1
        table[row, 0] = fragment


class OfferedOnce:
    """The keys that were offered recently.

    Args:
        num_keys: keys that the table has room for, rounded up to whole sets; 2 bytes each.
    """

    def __init__(self, num_keys: int) -> None:
        self._table = np.zeros((-(-num_keys // WAYS), WAYS), np.uint16)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def note(self, keys: Uint32Array) -> npt.NDArray[np.bool_]:
        """Record keys, uint32 ``[n, 8]``, and return which were offered before. O(n)."""
        was_offered = np.zeros(len(keys), np.uint8)
        _note_offers(self._table, keys, was_offered)
        return was_offered.astype(bool)
