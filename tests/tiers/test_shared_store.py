"""Stores of several processes at one place: each finds what the others store, while it runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import Body, Stored
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import write_frame
from pagedkv.tiers.redis_body import RedisBody
from pagedkv.tiers.shared_store import SharedStore
from pagedkv.tiers.words import StoreConfig, StoreOutcome
from tests.tiers.bodies import LASTING, SERVERS, TroubledBody, make_body
from tests.tiers.examples import IDENTITY, parts_of, some_runs
from tests.tiers.folder_writers import FORKS
from tests.tiers.test_store import SECONDS, loaded, put

NUM_RUNS: Final = 6


class ListedBody(TroubledBody):
    """A body whose scans have trouble as well: they wait at the gate, and fail."""

    num_scans = 0

    def scan(self) -> Iterator[Stored]:
        """List the entries after the trouble."""
        self.num_scans += 1
        self._suffer()
        yield from self.body.scan()


def shared(body: Body, rescan_s: float | None = None, **given: Any) -> SharedStore:  # noqa: ANN401
    settings: dict[str, Any] = {"cap_nbytes": 10**8, "max_entries": 1000, "admission": "always"} | given
    return SharedStore(body, IDENTITY, StoreConfig(**settings), rescan_s=rescan_s)


def until(condition: Callable[[], bool]) -> bool:
    """Wait until something is so; False if it does not come about."""
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        threading.Event().wait(0.002)
    return condition()


@pytest.fixture(params=LASTING)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Body]:
    """Make bodies of one kind at the same place."""
    url = request.getfixturevalue(SERVERS[request.param]) if request.param in SERVERS else ""
    return lambda: make_body(request.param, tmp_path, url, IDENTITY.fingerprint)


def test_two_stores_at_one_place_find_what_the_other_stores_and_lose_what_it_deletes(make: Callable[[], Body]) -> None:
    runs = some_runs(NUM_RUNS)
    with shared(make()) as one, shared(make()) as other:
        assert put(one, runs) == {StoreOutcome.STORED: NUM_RUNS}
        assert other.look_up(runs) == 0
        assert other.rescan() == NUM_RUNS
        assert other.rescan() == 0
        assert loaded(other, runs).num_runs == NUM_RUNS
        more = some_runs(2, seed=3)
        put(other, more)
        assert one.rescan() == 2
        assert loaded(one, more).num_runs == 2
        assert one.statistics().nbytes == other.statistics().nbytes == one.body.usage().nbytes
        one.withdraw(runs[3:])
        assert one.wait_until_quiet(SECONDS)
        other.rescan()
        assert (other.look_up(runs), other.statistics().num_vanished) == (3, NUM_RUNS - 3)
        assert other.statistics().nbytes == other.body.usage().nbytes
        for store in (one, other):
            store._core.check()


def test_what_one_store_has_withdrawn_it_does_not_find_again(make: Callable[[], Body]) -> None:
    runs = some_runs(2)
    with shared(make()) as one, shared(make()) as other:
        put(one, runs)
        one.withdraw(runs)
        assert one.wait_until_quiet(SECONDS)
        put(other, runs)
        assert one.rescan() == 0
        assert (one.look_up(runs), other.look_up(runs)) == (0, 2)


def test_a_reset_reaches_what_others_stored_before_it(make: Callable[[], Body]) -> None:
    runs = some_runs(3)
    with shared(make()) as one, shared(make()) as other:
        put(other, runs)
        one.reset()
        assert one.rescan() == 0
        assert one.wait_until_quiet(SECONDS)
        assert one.body.usage().nbytes == 0
        other.rescan()
        assert put(other, runs) == {StoreOutcome.STORED: 3}
        assert one.rescan() == 3


def test_what_has_no_room_in_the_index_counts_against_the_cap(make: Callable[[], Body]) -> None:
    """It did not: nothing was listed, so nothing was measured, and the store wrote as if the bytes were not there."""
    runs = some_runs(11)
    frames = [write_frame(IDENTITY, run, parts_of(run)) for run in runs]
    cap_nbytes = sum(map(len, frames[:10]))
    with shared(make(), cap_nbytes=cap_nbytes) as store:
        assert put(store, runs[:10]) == {StoreOutcome.STORED: 10}
        store.body.write(runs[10].key, [frames[10]], 5.0)
        assert store.rescan() == 0
        assert store.wait_until_quiet(SECONDS)
        assert store.body.usage().nbytes <= cap_nbytes
        assert store.look_up(runs[:10]) == 9


def test_what_is_found_and_is_damaged_is_a_miss(tmp_path: Path) -> None:
    runs = some_runs(2)
    body = FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8)
    with shared(body) as store:
        body.write(runs[0].key, [b"no frame"], 1.0)
        assert store.rescan() == 1
        assert loaded(store, runs).num_runs == 0
        assert store.refusals == {"truncated": 1}


def _store_when_asked(root: Path, asked: Connection) -> None:
    """Store, in a process of its own, the runs of each seed that is asked for."""
    with shared(FolderBody(root, IDENTITY.fingerprint, 10**8)) as store:
        asked.send(0)
        while (seed := asked.recv()) is not None:
            put(store, some_runs(NUM_RUNS, seed=seed))
            asked.send(store.statistics().num_entries)


def test_a_process_finds_by_itself_what_another_one_stores_in_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_store_when_asked, args=(root, theirs), daemon=True)
    process.start()
    with shared(FolderBody(root, IDENTITY.fingerprint, 10**8), rescan_s=0.005) as store:
        for seed in range(3):
            assert ours.poll(SECONDS), "the process does not answer"
            assert ours.recv() == seed * NUM_RUNS
            runs = some_runs(NUM_RUNS, seed=seed)
            assert store.look_up(runs) == 0
            ours.send(seed)
            assert until(lambda runs=runs: store.look_up(runs) == NUM_RUNS), "it is not found"  # type: ignore[misc]
            assert loaded(store, runs).num_runs == NUM_RUNS
        ours.send(None)
        process.join(SECONDS)
        assert process.exitcode == 0


def scanning_threads() -> set[threading.Thread]:
    """Give the threads of all scans of this process."""
    return {each for each in threading.enumerate() if each.name.endswith("-scan")}


def test_without_rescans_nothing_is_listed_and_no_thread_runs(tmp_path: Path) -> None:
    body = ListedBody(FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8))
    of_others = scanning_threads()
    with shared(body):
        assert body.num_scans == 1
        assert scanning_threads() <= of_others
    with shared(body, rescan_s=1000.0):
        (own,) = scanning_threads() - of_others
    assert own not in scanning_threads()


def test_a_scan_that_hangs_keeps_no_request_waiting(tmp_path: Path) -> None:
    body = ListedBody(FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8))
    runs = some_runs(3)
    with shared(body) as store:
        put(store, runs)
        body.gate.clear()
        scans = threading.Thread(target=store.rescan)
        scans.start()
        assert until(lambda: body.num_scans == 2)
        assert store.look_up(runs) == 3
        assert store.load(runs, 0.01).wait(SECONDS).num_runs == 0, "reads hang as well"
        body.gate.set()
        scans.join()
        assert loaded(store, runs).num_runs == 3


def test_a_scan_that_fails_leaves_all_entries_and_is_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    body = ListedBody(FolderBody(root, IDENTITY.fingerprint, 10**8))
    runs = some_runs(3)
    with shared(body, rescan_s=0.002) as store, shared(FolderBody(root, IDENTITY.fingerprint, 10**8)) as other:
        put(store, runs)
        body.error = ConnectionError("no listing now")
        assert until(lambda: store.last_problem == "scan: no listing now")
        assert store.look_up(runs) == 3
        body.error = None
        put(other, some_runs(2, seed=9))
        assert until(lambda: store.look_up(some_runs(2, seed=9)) == 2)


def test_a_closed_store_is_not_scanned(tmp_path: Path) -> None:
    store = shared(FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8))
    store.close()
    with pytest.raises(ConfigurationError, match="is closed"):
        store.rescan()


def test_a_scan_of_redis_orders_names_by_their_last_use_before_the_scan(redis_url: str, tmp_path: Path) -> None:
    """It did not: the length was asked for first, which is a use."""
    with closing(RedisBody(redis_url, IDENTITY.fingerprint, prefix=tmp_path.name)) as body:
        idle = {run.key: seconds for run, seconds in zip(some_runs(3), (500, 9000, 20), strict=True)}
        for key, seconds in idle.items():
            body.write(key, [b"content"], 5.0)
            name = body._name(key)
            dumped = body._client.dump(name)
            body._client.restore(name, 0, dumped, replace=True, idletime=seconds)
        found = sorted(body.scan(), key=lambda each: each.used_s)
        assert [each.key for each in found] == sorted(idle, key=lambda key: -idle[key])
