"""The store core, call by call: admission, room, coalescing, deadlines, the breaker, withdrawal, and its figures."""

import hashlib
from collections import Counter
from itertools import permutations
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.compilation.compiled import is_compiling_at_all
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.core import StoreCore
from pagedkv.tiers.offers import OfferedOnce
from pagedkv.tiers.timing import BreakerState, SteadyClock
from pagedkv.tiers.words import (
    Delete,
    Fault,
    Loaded,
    LoadEnd,
    Offered,
    Read,
    StoreConfig,
    StoreEventKind,
    StoreOutcome,
    Write,
    words_of,
)

pytestmark = pytest.mark.interpreted

POLICIES: Final = ("lru",) if is_compiling_at_all() else ("lru", "adaptive", "fifo", "hazard")
"""Compiled, the loops of each policy take 20 s, once; the interpreted run has them all."""


def keys(*numbers: int) -> npt.NDArray[np.uint8]:
    names = b"".join(hashlib.sha256(number.to_bytes(4, "little")).digest() for number in numbers)
    return np.frombuffer(names, np.uint8).reshape(len(numbers), 32)


def name(number: int) -> bytes:
    return bytes(keys(number))


def core(**given: Any) -> StoreCore:  # noqa: ANN401 - settings of any type
    settings: dict[str, Any] = {
        "cap_nbytes": 1000,
        "max_entries": 100,
        "admission": "always",
        "max_events": 1000,
    } | given
    return StoreCore(StoreConfig(**settings))


def outcomes(store: StoreCore) -> list[StoreOutcome]:
    """Take the answers to offers, in the order of their keys."""
    answers = [answer for answer in store.take_answers() if isinstance(answer, Offered)]
    return [answer.outcome for answer in sorted(answers, key=lambda each: (each.offer, each.place))]


def carry_out(store: StoreCore, now_s: float = 0.0) -> Counter[type]:
    """Carry out all actions, and those that follow from them."""
    done: Counter[type] = Counter()
    while actions := store.take_actions():
        for action in actions:
            store.completed(action.action, now_s)
            store.check()
            done[type(action)] += 1
    return done


def stored(store: StoreCore, *numbers: int, nbytes: int = 100, now_s: float = 0.0) -> list[StoreOutcome]:
    store.offer(keys(*numbers), [nbytes] * len(numbers), now_s)
    carry_out(store, now_s)
    return outcomes(store)


def loaded(store: StoreCore) -> Loaded:
    (answer,) = store.take_answers()
    assert isinstance(answer, Loaded)
    return answer


def test_what_is_offered_is_written_and_then_found() -> None:
    store = core()
    offer = store.offer(keys(1, 2), [100, 200], 0.0)
    writes = store.take_actions()
    assert [
        (type(each), each.key, each.nbytes, each.offer, each.place) for each in writes if isinstance(each, Write)
    ] == [
        (Write, name(1), 100, offer, 0),
        (Write, name(2), 200, offer, 1),
    ]
    assert store.look_up(keys(1, 2)) == 0, "not before it is written"
    for write in writes:
        store.completed(write.action, 0.0)
    assert (store.look_up(keys(1, 2)), store.look_up(keys(1, 3, 2)), store.statistics().nbytes) == (2, 1, 300)
    assert outcomes(store) == [StoreOutcome.STORED] * 2
    assert stored(store, 1, 3) == [StoreOutcome.PRESENT, StoreOutcome.STORED]


def stored_under(store: StoreCore, salt: bytes, *numbers: int, nbytes: int = 100) -> list[StoreOutcome]:
    store.offer(keys(*numbers), [nbytes] * len(numbers), 0.0, salt=salt)
    carry_out(store)
    return outcomes(store)


def test_a_salt_at_its_share_evicts_its_own_entries_and_no_other() -> None:
    store = core(salt_share=0.3)
    assert stored_under(store, b"", 10, 11, 12, 13) == [StoreOutcome.STORED] * 4, "without a salt there is no cap"
    assert stored_under(store, b"one", 1, 2) == [StoreOutcome.STORED] * 2
    assert stored_under(store, b"one", 3) == [StoreOutcome.STORED]
    assert stored_under(store, b"two", 20, 21) == [StoreOutcome.STORED] * 2
    assert stored_under(store, b"one", 4) == [StoreOutcome.STORED]
    there = [number for number in (1, 2, 3, 4, 10, 11, 12, 13, 20, 21) if store.look_up(keys(number))]
    assert there == [1, 3, 4, 10, 11, 12, 13, 20, 21], "2 is the tail of the oldest chain"
    assert store.statistics().num_evicted == 1
    owners = store._entries.owners
    assert (owners.nbytes_of(b"one"), owners.nbytes_of(b"two"), owners.nbytes_of(b"three")) == (300, 200, 0)


def test_of_a_chain_longer_than_the_share_the_head_is_stored() -> None:
    store = core(salt_share=0.3)
    assert stored_under(store, b"one", 1, 2, 3, 4) == [StoreOutcome.STORED] * 3 + [StoreOutcome.NO_ROOM]
    assert stored_under(store, b"two", 5, nbytes=301) == [StoreOutcome.NO_ROOM]
    assert store.statistics().num_evicted == 0, "nothing is evicted for what cannot fit"


def test_what_a_scan_found_is_charged_to_the_salt_that_offers_it() -> None:
    store = core(salt_share=0.3)
    store.restore(keys(1, 2, 3, 4), [100] * 4, 0.0)
    owners = store._entries.owners
    assert owners.nbytes_of(b"one") == 0
    assert stored_under(store, b"one", 1, 2) == [StoreOutcome.PRESENT] * 2
    assert not store.select_for_offer(keys(3, 4), 0.0, b"one").any()
    assert owners.nbytes_of(b"one") == 400, "beyond its share, until it stores again"
    assert stored_under(store, b"one", 5) == [StoreOutcome.STORED]
    assert owners.nbytes_of(b"one") == 300
    store.check()


def test_a_salt_without_entries_is_forgotten() -> None:
    store = core(salt_share=0.5)
    for turn in range(20):
        assert stored_under(store, bytes([turn + 1]), turn) == [StoreOutcome.STORED]
        store.withdraw(keys(turn), 0.0)
        carry_out(store)
    assert store._entries.owners._accounts == {}
    store.offer(keys(50), [100], 0.0, salt=b"late")
    (write,) = store.take_actions()
    assert store._entries.owners.nbytes_of(b"late") == 100, "from before the write"
    store.failed(write.action, Fault.IO, 0.0)
    assert store._entries.owners.nbytes_of(b"late") == 0


def test_without_a_share_no_owner_is_kept() -> None:
    assert core().statistics().index_nbytes + 101 * 4 == core(salt_share=0.9).statistics().index_nbytes
    for wrong in (0, -1, 1.5, "half"):
        with pytest.raises(ConfigurationError, match="salt_share"):
            core(salt_share=wrong)


def test_content_is_admitted_when_it_is_offered_again() -> None:
    store = core(admission="second-offer")
    assert stored(store, 1, 2) == [StoreOutcome.NOT_ADMITTED] * 2
    assert stored(store, 2, 3) == [StoreOutcome.STORED, StoreOutcome.NOT_ADMITTED]


def test_offers_are_remembered_for_about_as_many_keys_as_there_are_entries() -> None:
    offered = OfferedOnce(2000)
    words = words_of(keys(*range(800)))
    assert not offered.note(words).any()
    assert offered.note(words).mean() > 0.95
    offered.note(words_of(keys(*range(800, 8000))))
    assert offered.note(words).mean() < 0.01
    assert offered.nbytes == 4000


@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_waits_for_the_deletes_that_make_its_room(policy: str) -> None:
    store = core(eviction=policy)
    assert set(stored(store, *range(10))) == {StoreOutcome.STORED}
    store.offer(keys(100), [250], 1.0)
    deletes = store.take_actions()
    assert [type(each) for each in deletes] == [Delete] * 3
    assert store.statistics().nbytes == 1000, "bytes count until they are deleted"
    for delete in deletes[:2]:
        store.completed(delete.action, 1.0)
    assert store.take_actions() == []
    store.completed(deletes[2].action, 1.0)
    (write,) = store.take_actions()
    assert isinstance(write, Write)
    assert store.statistics().nbytes == 950
    store.check()


def test_of_one_chain_the_tail_is_evicted_first_and_a_use_renews_it() -> None:
    store = core(cap_nbytes=400)
    stored(store, 1, 2)
    stored(store, 3, 4)
    store.load(keys(1), 0.0, 1.0)
    carry_out(store)
    stored(store, 5)
    assert [store.look_up(keys(number)) for number in (1, 2, 3, 4, 5)] == [1, 0, 1, 1, 1]
    stored(store, 6)
    assert [store.look_up(keys(number)) for number in (1, 3, 4)] == [1, 1, 0]


def test_what_is_read_or_offered_is_not_evicted_and_what_finds_no_room_is_dropped() -> None:
    store = core(cap_nbytes=200)
    stored(store, 1, 2)
    store.load(keys(1, 2), 0.0, 10.0)
    store.offer(keys(3), [100], 0.0)
    assert outcomes(store) == [StoreOutcome.NO_ROOM]
    assert {type(each) for each in store.take_actions()} == {Read}
    assert stored(store, 4, nbytes=201) == [StoreOutcome.NO_ROOM]


def test_what_could_be_offered_again_is_evicted_all_the_same() -> None:
    store = core(cap_nbytes=300)
    stored(store, 1, 2, 3)
    for _ in range(5):
        assert not store.select_for_offer(keys(1, 2, 3), 0.0).any()
    assert stored(store, 4, 5, 6) == [StoreOutcome.STORED] * 3
    assert store.look_up(keys(1)) == 0


def test_entries_are_limited_as_bytes_are() -> None:
    store = core(max_entries=3)
    stored(store, 1, 2, 3)
    assert stored(store, 4) == [StoreOutcome.STORED]
    assert store.statistics().num_entries == 3
    assert store.look_up(keys(1, 2, 3)) == 2


def test_the_free_space_floor_and_foreign_bytes_make_room() -> None:
    store = core()
    stored(store, *range(5))
    store.measured(900, 10**6, 0.0)
    assert store.statistics().foreign_nbytes == 400
    assert stored(store, 10, 11) == [StoreOutcome.STORED] * 2
    assert store.statistics().nbytes <= 1000
    floored = core(floor_nbytes=500)
    stored(floored, *range(5))
    floored.measured(500, 250, 0.0)
    assert carry_out(floored)[Delete] == 3, "250 bytes below the floor"
    assert stored(floored, 10) == [StoreOutcome.STORED]
    assert floored.statistics().num_entries == 2, "one entry gives way to another"


def test_one_read_a_key_however_many_ask() -> None:
    store = core()
    stored(store, 1, 2)
    tickets = [store.load(keys(1, 2), 0.0, 1.0) for _ in range(3)]
    reads = store.take_actions()
    assert [type(each) for each in reads] == [Read] * 2
    store.completed(reads[1].action, 0.1, 100)
    assert store.take_answers() == []
    store.completed(reads[0].action, 0.2, 100)
    answers = store.take_answers()
    assert [(each.ticket, each.num_entries, each.nbytes) for each in answers if isinstance(each, Loaded)] == [
        (ticket, 2, 200) for ticket in tickets
    ]
    assert store.statistics().num_coalesced == 4


def test_an_ask_takes_what_came_by_its_deadline() -> None:
    store = core()
    stored(store, 1, 2, 3)
    store.load(keys(1, 2, 3), 0.0, 1.0)
    reads = store.take_actions()
    store.completed(reads[0].action, 0.5, 100)
    store.completed(reads[2].action, 0.5, 100)
    store.tick(0.99)
    assert store.take_answers() == []
    store.tick(1.0)
    answer = loaded(store)
    assert (answer.num_entries, answer.cause, answer.wait_s) == (1, LoadEnd.LATE, 1.0)
    store.completed(reads[1].action, 1.5, 100)
    store.check()
    assert store.statistics().num_not_loaded == {LoadEnd.LATE: 2}


@pytest.mark.parametrize(
    ("fault", "cause", "is_kept"),
    [
        (Fault.GONE, LoadEnd.GONE, False),
        (Fault.CORRUPT, LoadEnd.CORRUPT, False),
        (Fault.IO, LoadEnd.FAILED, True),
        (Fault.TIMEOUT, LoadEnd.FAILED, True),
    ],
)
def test_a_failed_read_ends_the_prefix_before_it(fault: Fault, cause: LoadEnd, *, is_kept: bool) -> None:
    store = core()
    stored(store, 1, 2, 3)
    store.load(keys(1, 2, 3), 0.0, 1.0)
    reads = store.take_actions()
    store.failed(reads[1].action, fault, 0.1)
    store.completed(reads[0].action, 0.1, 100)
    answer = loaded(store)
    assert (answer.num_entries, answer.cause) == (1, cause)
    store.completed(reads[2].action, 0.1, 100)
    assert carry_out(store)[Delete] == (not is_kept), "a server that denies it may have it all the same"
    assert store.look_up(keys(1, 2)) == 1 + is_kept
    assert store.statistics().nbytes == 200 + 100 * is_kept


def test_a_frame_of_another_size_than_was_written_is_corrupt() -> None:
    store = core()
    stored(store, 1)
    store.load(keys(1), 0.0, 1.0)
    (read,) = store.take_actions()
    store.completed(read.action, 0.1, 101)
    assert loaded(store).cause is LoadEnd.CORRUPT


def test_reads_that_no_ask_waits_for_are_not_begun() -> None:
    store = core(max_reads=1)
    stored(store, 1, 2, 3)
    ticket = store.load(keys(1, 2, 3), 0.0, 1.0)
    (read,) = store.take_actions()
    store.cancel(ticket)
    assert loaded(store).num_entries == 0
    store.completed(read.action, 0.1, 100)
    assert store.take_actions() == []
    store.check()


def test_a_failed_write_counts_until_its_delete_is_done() -> None:
    store = core()
    store.offer(keys(1), [600], 0.0)
    (write,) = store.take_actions()
    store.failed(write.action, Fault.IO, 0.0)
    assert outcomes(store) == [StoreOutcome.FAILED]
    (delete,) = store.take_actions()
    assert isinstance(delete, Delete)
    store.offer(keys(2), [600], 0.0)
    assert store.take_actions() == []
    store.failed(delete.action, Fault.IO, 0.0)
    assert (store.take_actions(), store.statistics().nbytes) == ([], 600)
    store.tick(1.0)
    (delete,) = store.take_actions()
    store.completed(delete.action, 1.0)
    (write,) = store.take_actions()
    assert isinstance(write, Write)
    store.check()


def test_a_full_medium_pauses_writes_and_gives_way() -> None:
    store = core()
    stored(store, 1, 2)
    store.offer(keys(3, 4), [100, 100], 0.0)
    writes = store.take_actions()
    store.failed(writes[0].action, Fault.FULL, 0.0)
    store.completed(writes[1].action, 0.0)
    assert outcomes(store) == [StoreOutcome.NO_ROOM, StoreOutcome.STORED]
    assert carry_out(store)[Delete] == 2, "what was written, and one entry for it"
    store.offer(keys(5), [100], 0.5)
    assert store.take_actions() == []
    store.tick(1.0)
    assert [type(each) for each in store.take_actions()] == [Write]
    assert store.statistics().breaker is BreakerState.CLOSED


def test_a_medium_that_stays_full_keeps_the_entries_that_are_there() -> None:
    """Each write that found it full evicted one more, until none was left."""
    store = core(max_writes=1, full_pause_s=1.0, breaker_longest_pause_s=8.0)
    stored(store, *range(8))
    times = []
    for now_s in range(20, 60):
        store.offer(keys(now_s), [100], now_s)
        while actions := store.take_actions():
            for action in actions:
                if isinstance(action, Write):
                    times.append(now_s)
                    store.failed(action.action, Fault.FULL, now_s)
                else:
                    store.completed(action.action, now_s)
    assert store.statistics().num_entries == 7, "one entry gives way, since the medium may hold only so many"
    assert times == [20, 21, 23, 27, 35, 43, 51, 59], "and writes pause longer each time"
    store.tick(80.0)
    store.take_answers()
    assert stored(store, 99, now_s=80.0) == [StoreOutcome.STORED]


def test_what_was_lost_is_counted() -> None:
    store = core(max_writes=1, max_queued_nbytes=200)
    stored(store, 1)
    stored(store, 1)
    assert store.num_lost == 0, "what is there is not lost"
    store.offer(keys(2, 3, 4, 5), [100] * 4, 0.0)
    assert store.num_lost == 2
    (write,) = store.take_actions()
    store.failed(write.action, Fault.IO, 0.0)
    assert store.num_lost == 3
    store.withdraw(keys(3), 0.0)
    assert store.num_lost == 3


def test_an_entry_that_cannot_be_read_goes_and_the_tier_stays_in_service() -> None:
    """It stayed listed: nobody stored it anew, and five asks for it put all others out of service."""
    store = core(breaker_failures=4)
    stored(store, 1)
    for turn in range(3):
        store.load(keys(1), float(turn), 1.0)
        (read,) = store.take_actions()
        store.failed(read.action, Fault.IO, float(turn))
    assert (store.look_up(keys(1)), store.statistics().breaker) == (0, BreakerState.CLOSED)
    assert carry_out(store)[Delete] == 1
    store = core(breaker_failures=4)
    stored(store, 1)
    for turn in range(4, 7):  # and one whose reads never end in time
        store.load(keys(1), 10.0 * turn, 5.0)
        (read,) = (each for each in store.take_actions() if isinstance(each, Read))
        store.tick(10.0 * turn + 3.0)
        store.completed(read.action, 10.0 * turn + 4.0, 100)
    assert (store.look_up(keys(1)), store.statistics().breaker) == (0, BreakerState.CLOSED)


def test_entries_outlast_an_outage_of_the_body() -> None:
    store = core(breaker_failures=2, breaker_pause_s=1.0, breaker_longest_pause_s=1.0)
    stored(store, 1, 2)
    for turn in range(6):
        store.load(keys(1, 2), 2.0 * turn, 1.0)
        for read in store.take_actions():
            store.failed(read.action, Fault.IO, 2.0 * turn)
    assert store.statistics().times_opened == 3
    assert store.statistics().num_entries == 1, "the probes have cost one"


def test_reads_that_hang_between_reads_that_succeed_open_the_breaker() -> None:
    """Each success began the count anew: a third of the reads hung, and requests went on waiting for them."""
    store = core(breaker_failures=3, breaker_pause_s=1.0, breaker_longest_pause_s=60.0, read_timeout_s=2.0)
    stored(store, *range(9))
    now_s, openings = 0.0, []
    for number in (number for _ in range(30) for number in range(9)):
        now_s += 0.5
        store.tick(now_s)
        store.load(keys(number), now_s, 2.0)
        for read in store.take_actions():
            assert isinstance(read, Read)
            if number % 3 == 0:
                now_s += 2.0
                store.tick(now_s)
                store.failed(read.action, Fault.TIMEOUT, now_s)
                openings += [now_s] * (store.statistics().breaker is BreakerState.OPEN)
            else:
                now_s += 0.01
                store.completed(read.action, now_s, 100)
    pauses = np.diff(openings)
    assert len(openings) >= 5
    assert (pauses[1:] > pauses[:-1]).all(), "a probe that succeeds is no cure"


def test_slow_reads_and_failures_now_and_then_do_not_open_the_breaker() -> None:
    store = core(breaker_failures=3, read_timeout_s=2.0)
    stored(store, 1, *range(100, 105))
    now_s = 0.0
    for turn in range(200):
        number = 100 + turn // 40 if turn % 40 == 0 and turn else 1
        store.load(keys(number), now_s, 5.0)
        (read,) = store.take_actions()
        now_s += 2.0 if number != 1 else 0.5
        store.tick(now_s)
        store.completed(read.action, now_s, 100)
    assert store.statistics().times_opened == 0


def test_deletes_that_succeed_are_no_sign_that_a_body_works() -> None:
    """A folder that was emptied: writes fail, what they may have left is deleted, and the breaker stayed closed."""
    store = core(breaker_failures=3, max_writes=1)
    for number in range(3):
        store.offer(keys(number), [100], 0.0)
        (write,) = store.take_actions()
        store.failed(write.action, Fault.IO, 0.0)
        for delete in store.take_actions():
            store.completed(delete.action, 0.0)
    assert store.statistics().breaker is BreakerState.OPEN


def test_content_that_cannot_be_deleted_keeps_no_tier_out_of_service() -> None:
    store = core(breaker_failures=2, breaker_pause_s=1.0, breaker_longest_pause_s=1.0)
    stored(store, 1, 2, 3, 4)
    store.withdraw(keys(3, 4), 0.0)
    for delete in store.take_actions():
        store.failed(delete.action, Fault.IO, 0.0)
    assert store.statistics().breaker is BreakerState.OPEN
    for turn in range(1, 4):
        store.tick(float(turn))
        for delete in store.take_actions():
            assert isinstance(delete, Delete)
            store.failed(delete.action, Fault.IO, float(turn))
        assert store.statistics().breaker is BreakerState.PROBING
    store.load(keys(1), 3.5, 1.0)
    (read,) = (each for each in store.take_actions() if isinstance(each, Read))
    store.completed(read.action, 3.5, 100)
    assert store.statistics().breaker is BreakerState.CLOSED


def test_more_offers_than_may_wait_are_dropped_at_once() -> None:
    store = core(cap_nbytes=10_000, max_writes=1, max_queued_nbytes=200)
    store.offer(keys(*range(5)), [100] * 5, 0.0)
    assert outcomes(store) == [StoreOutcome.BUSY] * 3
    carry_out(store)
    assert outcomes(store) == [StoreOutcome.STORED] * 2
    store.offer(keys(*range(5, 8)), [100] * 3, 0.0)
    store.drop_queue(0.0)
    assert outcomes(store).count(StoreOutcome.LATE) == 1
    store.check()


def test_the_breaker_opens_probes_and_closes() -> None:
    store = core(breaker_failures=3, breaker_pause_s=1.0)
    stored(store, 1, 2, 3)
    for number in (3, 2, 1):
        store.load(keys(number), 0.0, 1.0)
        (read,) = store.take_actions()
        store.failed(read.action, Fault.IO, 0.0)
        assert loaded(store).cause is LoadEnd.FAILED
    assert store.statistics().breaker is BreakerState.OPEN
    assert store.look_up(keys(1)) == 0
    store.load(keys(1), 0.5, 1.0)
    assert loaded(store).cause is LoadEnd.OUT_OF_SERVICE
    assert stored(store, 9) == [StoreOutcome.OUT_OF_SERVICE]
    store.tick(1.0)
    store.load(keys(1, 2), 1.0, 1.0)
    (probe,) = store.take_actions()
    store.failed(probe.action, Fault.IO, 1.0)
    assert loaded(store).num_entries == 0
    store.tick(2.5)
    assert store.statistics().breaker is BreakerState.OPEN, "the pause is twice as long"
    store.tick(3.0)
    store.load(keys(1, 2), 3.0, 1.0)
    (probe,) = store.take_actions()
    store.completed(probe.action, 3.0, 100)
    assert store.statistics().breaker is BreakerState.CLOSED
    (read,) = store.take_actions()
    store.completed(read.action, 3.0, 100)
    assert loaded(store).num_entries == 2


def test_a_body_that_hangs_holds_no_request() -> None:
    store = core(max_reads=2, max_writes=1, breaker_failures=3, read_timeout_s=1.0, write_timeout_s=1.0)
    stored(store, 1, 2, 3)
    store.load(keys(1, 2, 3), 0.0, 60.0)
    store.offer(keys(7, 8), [100, 100], 0.0)
    hung = store.take_actions()
    assert len(hung) == 3
    store.tick(1.0)
    assert store.statistics().breaker is BreakerState.OPEN
    answers = store.take_answers()
    assert {getattr(each, "cause", None) or getattr(each, "outcome", None) for each in answers} == {
        LoadEnd.LATE,
        StoreOutcome.LATE,
    }
    assert (store.statistics().num_waiting, store.statistics().num_queued) == (0, 0)
    for action in hung:
        store.completed(action.action, 100.0, 100)
        store.check()
    assert store.look_up(keys(7)) == 1, "what was written late is there"


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_withdrawing_reaches_what_continues_an_entry_in_whatever_order_writes_ended(order: tuple[int, ...]) -> None:
    store = core()
    store.offer(keys(1, 2, 3), [100] * 3, 0.0)
    writes = store.take_actions()
    for place in order:
        store.completed(writes[place].action, 0.0)
        store.check()
    assert outcomes(store) == [StoreOutcome.STORED] * 3
    assert store.withdraw(keys(2), 0.0) == 2
    assert store.look_up(keys(1, 2, 3)) == 1


@pytest.mark.parametrize("place", [1, 2])
def test_a_write_under_way_of_what_continues_a_withdrawn_entry_leaves_nothing(place: int) -> None:
    store = core()
    store.offer(keys(1, 2, 3), [100] * 3, 0.0)
    writes = store.take_actions()
    for each in writes[:place]:
        store.completed(each.action, 0.0)
    store.withdraw(keys(1), 0.0)
    for each in writes[place:]:
        store.completed(each.action, 0.0)
    carry_out(store)
    assert StoreOutcome.WITHDRAWN in outcomes(store)
    assert store.look_up(keys(1)) == store.statistics().nbytes == 0
    assert stored(store, 3) == [StoreOutcome.WITHDRAWN], "it continues what was withdrawn"


def test_a_failed_write_lets_those_behind_it_end() -> None:
    store = core()
    store.offer(keys(1, 2, 3), [100] * 3, 0.0)
    first, second, third = store.take_actions()
    for action in (third, second):
        store.completed(action.action, 0.0)
    store.failed(first.action, Fault.IO, 0.0)
    store.check()
    assert outcomes(store) == [StoreOutcome.FAILED, StoreOutcome.STORED, StoreOutcome.STORED]


def test_a_write_that_waits_for_another_is_late_with_it_and_no_failure_of_the_body() -> None:
    store = core(write_timeout_s=2.0)
    store.offer(keys(1, 2), [100] * 2, 0.0)
    first, second = store.take_actions()
    store.completed(second.action, 1.0)
    with pytest.raises(ConfigurationError, match="was reported before"):
        store.completed(second.action, 1.0)
    store.tick(3.0)
    store.check()
    assert outcomes(store) == [StoreOutcome.LATE] * 2
    assert store.statistics().faults == {"overdue": 1}
    store.completed(first.action, 4.0)
    store.check()
    assert store.look_up(keys(1, 2)) == 2, "what was written late is there"
    assert store.withdraw(keys(1), 4.0) == 2


def test_keys_that_claim_to_continue_each_other_do_not_wait_for_ever() -> None:
    store = core()
    store.offer(keys(1), [100], 0.0, name(2))
    store.offer(keys(2), [100], 0.0, name(1))
    carry_out(store)
    assert store.look_up(keys(1)) == store.look_up(keys(2)) == 1


def test_withdrawn_content_and_what_continues_it_is_gone_for_good() -> None:
    store = core()
    stored(store, 1, 2, 3)
    stored(store, 1, 4)
    ticket = store.load(keys(1, 2), 0.0, 1.0)
    assert store.withdraw(keys(2), 0.0) == 2
    reads = store.take_actions()
    for action in reads:
        store.completed(action.action, 0.0)
        store.check()
    answer = loaded(store)
    assert (answer.ticket, answer.num_entries, answer.cause) == (ticket, 1, LoadEnd.WITHDRAWN)
    carry_out(store)
    assert [store.look_up(keys(number)) for number in (1, 2, 3, 4)] == [1, 0, 0, 1]
    assert stored(store, 2, 3) == [StoreOutcome.WITHDRAWN] * 2
    store.restore(keys(2), [100], 0.0)
    assert carry_out(store)[Delete] == 1


def test_a_reset_removes_all_and_what_is_being_written() -> None:
    store = core()
    stored(store, 1, 2)
    store.offer(keys(3), [100], 0.0)
    assert store.reset(0.0) == 2
    assert carry_out(store) == {Write: 1, Delete: 3}
    assert outcomes(store) == [StoreOutcome.WITHDRAWN]
    assert (store.statistics().num_entries, store.statistics().nbytes) == (0, 0)
    assert stored(store, 1) == [StoreOutcome.STORED]


def test_a_scan_enters_the_latest_within_the_limits_and_deletes_the_rest() -> None:
    store = core(cap_nbytes=300)
    assert store.restore(keys(1, 2, 3, 4), [100] * 4, 0.0) == 3
    assert [store.look_up(keys(number)) for number in (1, 2, 3, 4)] == [0, 1, 1, 1]
    (delete,) = store.take_actions()
    assert delete.key == name(1)
    store.completed(delete.action, 0.0)
    stored(store, 5)
    assert [store.look_up(keys(number)) for number in (2, 3, 4, 5)] == [0, 1, 1, 1]


def test_events_follow_the_entries() -> None:
    store = core(cap_nbytes=200, max_events=4)
    stored(store, 1, 2)
    stored(store, 3)
    events = store.drain_events()
    assert [StoreEventKind(kind).name for kind in events.kinds.tolist()] == ["STORED", "STORED", "REMOVED", "STORED"]
    assert [row.tobytes() for row in events.keys] == [name(1), name(2), name(2), name(3)]
    for number in range(4, 10):
        stored(store, number)
    assert store.drain_events().kinds[0] == StoreEventKind.GAP
    assert len(store.drain_events()) == 0


def test_a_clock_that_jumps_back_stops_no_deadline() -> None:
    store = core()
    stored(store, 1)
    store.load(keys(1), 1000.0, 1.0)
    store.tick(-5000.0)
    store.tick(-4999.5)
    assert [each for each in store.take_answers() if isinstance(each, Loaded)] == []
    store.tick(-4998.9)
    assert loaded(store).cause is LoadEnd.LATE
    clock = SteadyClock()
    assert [clock.advance(now) for now in (5.0, 6.0, 2.0, 3.0, 100.0)] == [0.0, 1.0, 1.0, 2.0, 99.0]


def test_the_time_of_a_load_is_predicted_from_latency_and_rate() -> None:
    store = core(cap_nbytes=10**9, max_reads=1)
    assert store.predict_s(100, 1) is None
    now = 0.0
    for number, nbytes in enumerate([1000, 100_000] * 5):
        stored(store, number, nbytes=nbytes, now_s=now)
        store.load(keys(number), now, 10.0)
        (read,) = store.take_actions()
        now += 0.01 + nbytes / 1e6
        store.completed(read.action, now, nbytes)
        store.take_answers()
    assert store.predict_s(2_000_000, 4) == pytest.approx(2.04, rel=0.01)


def test_an_entry_takes_at_most_a_hundred_bytes() -> None:
    for max_entries in (10_000, 12_345, 16_384, 21_846):
        store = core(max_entries=max_entries, admission="second-offer")
        assert (store.statistics().index_nbytes - 4000) / max_entries <= 100


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    store = core()
    with pytest.raises(ConfigurationError, match=r"keys must be uint8 \[n, 32\], got int64 \(2,\)"):
        store.look_up(np.zeros(2, np.int64))
    with pytest.raises(ConfigurationError, match="2 keys need as many sizes, got 1"):
        store.offer(keys(1, 2), [5], 0.0)
    with pytest.raises(ConfigurationError, match="a key is offered twice at once"):
        store.offer(keys(1, 1), [5, 5], 0.0)
    with pytest.raises(ConfigurationError, match="the size of an entry must be at least 1, got 0"):
        store.offer(keys(1), [0], 0.0)
    with pytest.raises(ConfigurationError, match="deadline of a load must be above 0 seconds"):
        store.load(keys(1), 0.0, 0.0)
    with pytest.raises(ConfigurationError, match="action 7 is not in flight"):
        store.completed(7, 0.0)
    with pytest.raises(ConfigurationError, match="read_timeout_s must be above 0"):
        core(read_timeout_s=0)
    with pytest.raises(ConfigurationError, match="eviction must be one of"):
        core(eviction="random")
    store.check()
    assert store.statistics().num_offered == store.statistics().num_asked == 0


def test_empty_asks_and_offers_are_answered() -> None:
    store = core()
    store.offer(keys(), [], 0.0)
    store.load(keys(), 0.0, 1.0)
    assert loaded(store).num_entries == 0
    store.check()
