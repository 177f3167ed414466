"""Scans of a store core while it runs: what others stored enters, what vanished leaves, whatever happens beside it."""

import numpy as np
import pytest

from pagedkv.tiers.core import StoreCore
from pagedkv.tiers.words import Delete, Fault, LoadEnd, StoreEventKind, StoreOutcome, Write
from tests.tiers.test_core import carry_out, core, keys, loaded, name, outcomes, stored

pytestmark = pytest.mark.interpreted


def scan(store: StoreCore, *there: int, nbytes: int = 100) -> int:
    """Scan a body in which so much is there, in one piece."""
    store.begin_scan()
    return finish(store, *there, nbytes=nbytes)


def finish(store: StoreCore, *there: int, nbytes: int = 100) -> int:
    """Give a store all that an open scan lists."""
    is_new = store.compare_scan(keys(*there)).tolist() if there else []
    while store.lose_vanished(7):
        store.check()
    new = [number for number, may in zip(there, is_new, strict=True) if may]
    num_listed = store.adopt(keys(*new), [nbytes] * len(new), 0.0) if new else 0
    store.end_scan(is_whole=True)
    store.check()
    return num_listed


def there(store: StoreCore, *numbers: int) -> list[int]:
    return [number for number in numbers if store.contains(keys(number))[0]]


def test_what_others_stored_is_listed_once_and_what_vanished_leaves_the_index() -> None:
    store = core()
    stored(store, 1, 2)
    assert scan(store, 1, 2, 3, 4) == 2
    assert scan(store, 1, 2, 3, 4) == 0
    assert there(store, 1, 2, 3, 4) == [1, 2, 3, 4]
    seen = store.statistics()
    assert (seen.num_found, seen.num_vanished, seen.num_entries) == (2, 0, 4)
    scan(store, 2, 4)
    assert there(store, 1, 2, 3, 4) == [2, 4]
    assert store.statistics().num_vanished == 2
    assert store.take_actions() == [], "nothing is deleted"
    events = store.drain_events()
    names = [(StoreEventKind(kind).name, row.tobytes()) for kind, row in zip(events.kinds, events.keys, strict=True)]
    assert sorted(names[-2:]) == sorted([("REMOVED", name(1)), ("REMOVED", name(3))])


def test_bytes_of_what_is_found_were_foreign_and_of_what_vanished_are_until_they_are_measured() -> None:
    store = core()
    stored(store, 1)
    store.measured(400, None, 0.0)
    assert (store.statistics().nbytes, store.statistics().foreign_nbytes) == (400, 300)
    scan(store, 1, 2, 3)
    assert (store.statistics().nbytes, store.statistics().foreign_nbytes) == (400, 100)
    scan(store, 2)
    assert (store.statistics().nbytes, store.statistics().foreign_nbytes) == (400, 300)
    store.measured(100, None, 0.0)
    assert (store.statistics().nbytes, store.statistics().foreign_nbytes) == (100, 0)


def test_nothing_is_evicted_or_deleted_for_what_is_found() -> None:
    store = core(max_entries=4)
    stored(store, 1, 2)
    assert scan(store, *range(1, 10)) == 2
    assert there(store, *range(1, 10)) == [1, 2, 3, 4]
    small = core(cap_nbytes=350)
    stored(small, 1, 2)
    assert scan(small, 1, 2, 3, 4) == 1
    assert small.statistics().num_evicted == store.statistics().num_evicted == 0
    assert small.take_actions() == store.take_actions() == []


def test_a_key_that_a_server_lists_twice_is_one_entry() -> None:
    store = core()
    assert scan(store, 5, 5, 5) == 1
    fresh = core()
    assert fresh.restore(keys(1, 2, 1), [100, 100, 100], 0.0) == 2
    fresh.check()
    assert fresh.statistics().nbytes == 200


def test_withdrawn_content_that_others_store_again_is_not_listed() -> None:
    store = core()
    stored(store, 1, 2)
    store.withdraw(keys(2), 0.0)
    carry_out(store)
    assert scan(store, 1, 2) == 0
    assert there(store, 1, 2) == [1]


def test_what_waits_for_its_delete_is_not_listed_and_not_after_the_delete_either() -> None:
    store = core()
    stored(store, 1, 2)
    store.withdraw(keys(), 0.0)
    store._entries.remove_all({name(1)})
    assert scan(store, 1, 2) == 0, "its delete waits"
    store.begin_scan()
    is_new = store.compare_scan(keys(1, 2))
    assert is_new.tolist() == [True, False]
    store.tick(0.0)
    carry_out(store)  # the delete of 1, after the scan has listed it
    assert store.adopt(keys(1), [100], 0.0) == 0
    store.end_scan(is_whole=True)
    assert scan(store, 2, 1) == 1, "another process has stored it since"


def test_what_is_evicted_while_a_scan_is_open_is_not_listed() -> None:
    store = core(cap_nbytes=200)
    stored(store, 1, 2)
    store.begin_scan()
    assert store.compare_scan(keys(1, 2)).tolist() == [False, False]
    store.compare_scan(keys(3))
    stored(store, 3)  # evicts 2, the tail
    assert there(store, 1, 2, 3) == [1, 3]
    assert store.adopt(keys(2), [50], 0.0) == 0


def test_what_is_written_while_a_scan_is_open_has_not_vanished_and_is_not_listed_twice() -> None:
    store = core()
    stored(store, 1)
    store.begin_scan()
    store.compare_scan(keys(1))
    stored(store, 2)  # the scan has passed its place
    finish(store, 1)
    assert there(store, 1, 2) == [1, 2]
    store.offer(keys(3), [100], 0.0)
    (write,) = store.take_actions()
    assert isinstance(write, Write)
    assert scan(store, 1, 2, 3) == 0, "it is being written"
    store.completed(write.action, 0.0)
    assert there(store, 1, 2, 3) == [1, 2, 3]
    assert scan(store, 1, 2, 3) == 0


def test_what_is_evicted_and_written_again_while_a_scan_is_open_stays() -> None:
    store = core()
    stored(store, 1)
    store.begin_scan()
    store._entries.evict(1)
    store.tick(0.0)
    carry_out(store)
    assert stored(store, 1) == [StoreOutcome.STORED]
    finish(store)
    assert there(store, 1) == [1]


def test_queued_content_that_a_scan_finds_is_not_written() -> None:
    store = core(max_writes=1)
    store.offer(keys(1, 2), [100, 100], 0.0)
    (write,) = store.take_actions()
    assert scan(store, 2) == 1
    store.completed(write.action, 0.0)
    assert store.take_actions() == []
    assert outcomes(store) == [StoreOutcome.STORED, StoreOutcome.PRESENT]


def test_an_entry_that_vanishes_while_it_is_read_is_a_miss_and_is_not_deleted() -> None:
    store = core()
    stored(store, 1)
    store.load(keys(1), 0.0, 1.0)
    (read,) = store.take_actions()
    scan(store)
    store.failed(read.action, Fault.GONE, 0.0)
    store.check()
    assert loaded(store).num_entries == 0
    assert store.take_actions() == []


def test_a_scan_that_is_open_when_the_store_is_reset_lists_nothing_and_the_next_one_deletes_what_it_finds() -> None:
    store = core()
    stored(store, 1)
    store.begin_scan()
    is_new = store.compare_scan(keys(1, 2))
    assert is_new.tolist() == [False, True]
    store.reset(0.0)
    assert store.adopt(keys(2), [100], 0.0) == 0
    assert not store.lose_vanished(100)
    store.end_scan(is_whole=True)
    carry_out(store)
    store.begin_scan()
    store.end_scan(is_whole=False)  # it failed
    assert stored(store, 4) == [StoreOutcome.STORED]
    store.measured(200, None, 0.0)
    assert scan(store, 2, 4) == 0, "2 may be older than the reset"
    (delete,) = store.take_actions()
    assert isinstance(delete, Delete)
    assert delete.key == name(2)
    store.completed(delete.action, 0.0)
    assert store.statistics().nbytes == 100
    assert scan(store, 3, 4) == 1, "what comes later is listed"


def test_a_reset_ends_the_load_of_an_entry_that_a_scan_has_lost_meanwhile() -> None:
    """The listing may have left it out, and the read in flight brings content from before the reset."""
    store = core()
    stored(store, 1)
    store.load(keys(1), 0.0, 1.0)
    (read,) = store.take_actions()
    scan(store)
    store.reset(0.0)
    store.completed(read.action, 0.0, 100)
    store.check()
    answer = loaded(store)
    assert (answer.num_entries, answer.cause) == (0, LoadEnd.WITHDRAWN)


def test_a_scan_that_fails_changes_nothing() -> None:
    store = core()
    stored(store, 1, 2)
    store.begin_scan()
    store.compare_scan(keys(1))
    store.end_scan(is_whole=False)
    assert not store.lose_vanished(100)
    assert store.adopt(keys(9), [100], 0.0) == 0
    assert store.compare_scan(keys(9)).tolist() == [False]
    assert there(store, 1, 2, 9) == [1, 2]


def test_vanished_entries_are_looked_for_in_the_whole_index() -> None:
    store = core(cap_nbytes=10**6, max_entries=100)
    numbers = tuple(range(100))
    stored(store, *numbers)
    kept = tuple(int(number) for number in np.arange(0, 100, 3))
    scan(store, *kept)
    assert tuple(there(store, *numbers)) == kept
    assert store.statistics().num_vanished == 100 - len(kept)
