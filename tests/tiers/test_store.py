"""Stores on threads: what is offered is served, also after a restart; what goes wrong is a miss in time."""

import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from pagedkv.contract.keys import RequestKeys
from pagedkv.errors import ConfigurationError, MissingExtraError
from pagedkv.tiers.body import Body, HostBody
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import _package, write_frame
from pagedkv.tiers.identity import Identity, Run
from pagedkv.tiers.object_body import ObjectBody
from pagedkv.tiers.redis_body import RedisBody
from pagedkv.tiers.specs import RedisTier
from pagedkv.tiers.store import LoadedRuns, TierStore
from pagedkv.tiers.timing import BreakerState
from pagedkv.tiers.words import LoadEnd, StoreConfig, StoreOutcome
from tests.tiers.bodies import (
    BUCKET,
    KINDS,
    LASTING,
    SERVERS,
    RedisServer,
    S3Server,
    TroubledBody,
    make_body,
    s3_options,
)
from tests.tiers.examples import IDENTITY, SALTED, SECRET, other_identities, parts_of, some_runs

SECONDS: Final = 20.0  # longer than any wait should be
MakeStore: TypeAlias = Callable[..., TierStore]


def store_on(body: Body, identity: Identity = IDENTITY, secret: bytes | None = None, **given: Any) -> TierStore:  # noqa: ANN401
    settings: dict[str, Any] = {"cap_nbytes": 10**8, "max_entries": 1000, "admission": "always"} | given
    return TierStore(body, identity, StoreConfig(**settings), secret=secret)


def put(store: TierStore, runs: list[Run]) -> Counter[StoreOutcome]:
    """Offer runs, and wait for their answers."""
    answers: list[StoreOutcome] = []
    store.offer(runs, [parts_of(run) for run in runs], lambda _place, outcome: answers.append(outcome))
    assert store.wait_until_quiet(SECONDS)
    until = time.monotonic() + SECONDS
    while len(answers) < len(runs) and time.monotonic() < until:
        threading.Event().wait(0.001)
    return Counter(answers)


def loaded(store: TierStore, runs: list[Run], deadline_s: float = SECONDS) -> LoadedRuns:
    """Load runs; whatever comes must be right."""
    result = store.load(runs, deadline_s).wait(SECONDS)
    for run, parts in zip(runs, result.parts, strict=False):
        assert tuple(map(bytes, parts)) == parts_of(run), "a wrong answer"
    return result


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Body]:
    url = request.getfixturevalue(SERVERS[kind]) if kind in SERVERS else ""

    def made(identity: Identity = IDENTITY) -> Body:
        return make_body(kind, tmp_path, url, identity.fingerprint)

    return made


def test_what_is_offered_is_served_and_after_a_restart_too(kind: str, make: Callable[..., Body]) -> None:
    runs = some_runs(12)
    with store_on(make()) as store:
        assert put(store, runs) == {StoreOutcome.STORED: 12}
        assert loaded(store, runs).num_runs == 12
        assert put(store, runs) == {StoreOutcome.PRESENT: 12}
        other_salt = some_runs(12, keys=RequestKeys("tuned", "2", b"another", SALTED.media))
        assert (loaded(store, other_salt).num_runs, loaded(store, some_runs(3, seed=5)).num_runs) == (0, 0)
    with store_on(make()) as store:
        again = loaded(store, runs)
        assert again.num_runs == (12 if kind in LASTING else 0)
        assert again.cause is (LoadEnd.NONE if kind in LASTING else LoadEnd.ABSENT)
    for name in ("layout strides", "model weights"):
        other = other_identities()[name]
        with store_on(make(other), other) as store:
            assert store.look_up(runs) == 0


def test_entries_that_are_damaged_in_any_way_are_misses_and_deleted(kind: str, make: Callable[..., Body]) -> None:
    if kind not in LASTING:
        pytest.skip("nothing else writes to the memory of this process")
    runs = some_runs(9)
    frames = [write_frame(IDENTITY, run, parts_of(run)) for run in runs]
    flipped = bytearray(frames[1])
    flipped[-30] ^= 4
    salted = some_runs(9, keys=RequestKeys("tuned", "2", b"another", SALTED.media))
    bad = {
        1: bytes(flipped),
        2: frames[3],
        3: frames[2],
        4: frames[4][:-64],
        5: write_frame(other_identities()["model weights"], runs[5], parts_of(runs[5])),
        6: write_frame(IDENTITY, salted[6], parts_of(runs[6])),
        7: frames[7][:8] + b"\x02" + frames[7][9:],
        8: write_frame(IDENTITY, runs[8], parts_of(runs[8]), SECRET),
    }
    body = make()
    for number, frame in enumerate(frames):
        body.write(runs[number].key, [bad.get(number, frame)], 5.0)
    with store_on(body) as store:
        assert loaded(store, runs[:1]).num_runs == 1
        for number in bad:
            result = loaded(store, runs[number : number + 1])
            assert (result.num_runs, result.cause) == (0, LoadEnd.CORRUPT)
        reasons = {"damaged": 1, "key": 2, "truncated": 1, "model": 1, "salt": 1, "version": 1, "keyed": 1}
        assert store.refusals == reasons
        assert store.wait_until_quiet(SECONDS)
        assert store.statistics().num_entries == 1
        assert put(store, runs)[StoreOutcome.STORED] == 8
        assert loaded(store, runs).num_runs == 9


def test_with_a_secret_forged_frames_with_valid_checksums_are_refused(tmp_path: Path) -> None:
    runs = some_runs(2)
    body = FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8)
    forged = write_frame(IDENTITY, runs[0], tuple(bytes(len(part)) for part in parts_of(runs[0])))
    body.write(runs[0].key, [forged], 1.0)
    with store_on(body, secret=SECRET) as store:
        assert loaded(store, runs).cause is LoadEnd.CORRUPT
        assert store.refusals == {"unkeyed": 1}
        assert store.wait_until_quiet(SECONDS)
        assert put(store, runs) == {StoreOutcome.STORED: 2}
        assert loaded(store, runs).num_runs == 2


def test_a_file_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    runs = some_runs(3)
    body = FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8)
    with store_on(body) as store:
        put(store, runs)
        body._path(runs[1].key).unlink()
        assert (result := loaded(store, runs)).num_runs == 1
        assert result.cause is LoadEnd.GONE
        assert store.look_up(runs) == 1


def test_the_cap_holds_while_more_is_stored_than_fits(tmp_path: Path) -> None:
    body = FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10_000)
    with store_on(body, cap_nbytes=10_000) as store:
        for seed in range(15):
            put(store, some_runs(3, seed=seed))
            assert body.usage().nbytes <= 10_000
        assert store.wait_until_quiet(SECONDS)
        assert store.statistics().nbytes <= 10_000
        assert store.statistics().num_evicted > 20
        assert loaded(store, some_runs(3, seed=14)).num_runs == 3


def test_a_load_that_hangs_is_answered_by_its_deadline_and_the_tier_comes_back() -> None:
    runs = some_runs(4)
    body = TroubledBody(HostBody())
    settings: dict[str, Any] = {"max_reads": 2, "read_timeout_s": 0.1, "breaker_failures": 2, "breaker_pause_s": 0.05}
    with store_on(body, **settings) as store:
        put(store, runs)
        body.gate.clear()
        begun_s = time.monotonic()
        assert loaded(store, runs, 0.05).cause is LoadEnd.LATE
        assert loaded(store, runs, 30.0).num_runs == 0
        assert time.monotonic() - begun_s < 5.0
        until = time.monotonic() + SECONDS
        while store.statistics().breaker is BreakerState.CLOSED and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert store.statistics().times_opened >= 1
        body.gate.set()
        while loaded(store, runs).num_runs < 4:
            assert time.monotonic() < until, "the tier does not come back"
            threading.Event().wait(0.01)


def test_a_body_that_fails_is_left_alone_and_content_is_released() -> None:
    runs = some_runs(10)
    body = TroubledBody(HostBody())
    body.error = OSError("no route to the server")
    with store_on(body, breaker_failures=3, breaker_pause_s=30.0, max_writes=1) as store:
        outcomes = put(store, runs)
        assert set(outcomes) <= {StoreOutcome.FAILED, StoreOutcome.OUT_OF_SERVICE}
        assert sum(outcomes.values()) == 10
        assert body.num_writes <= 3, "failed deletes count as well"
        assert "no route to the server" in store.last_problem
        assert put(store, some_runs(2, seed=3)) == {StoreOutcome.OUT_OF_SERVICE: 2}


def test_a_body_that_raises_anything_fails_as_a_tier_and_not_as_a_program() -> None:
    body = TroubledBody(HostBody())
    with store_on(body) as store:
        put(store, some_runs(1))
        body.error = RuntimeError("a fault of others' code")
        assert loaded(store, some_runs(1)).cause is LoadEnd.FAILED
        body.error = None
        assert loaded(store, some_runs(1)).num_runs == 1


def test_many_threads_that_load_the_same_read_once() -> None:
    runs = some_runs(6)
    body = TroubledBody(HostBody())
    with store_on(body, max_reads=6) as store:
        put(store, runs)
        body.gate.clear()
        loads = [store.load(runs, SECONDS) for _ in range(8)]
        body.gate.set()
        assert {load.wait(SECONDS).num_runs for load in loads} == {6}
        assert body.num_reads == 6


def test_offered_content_is_read_until_its_answer_and_no_longer() -> None:
    run = some_runs(1)[0]
    content = [bytearray(part) for part in parts_of(run)]
    body = TroubledBody(HostBody())
    answers: list[StoreOutcome] = []
    with store_on(body, write_timeout_s=0.05, breaker_failures=100) as store:
        body.gate.clear()
        store.offer([run], [content], lambda _place, outcome: answers.append(outcome))
        until = time.monotonic() + SECONDS
        while not store.statistics().offers and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert store.statistics().offers == {StoreOutcome.LATE: 1}
        assert answers == [], "it is late, and still being read"
        body.gate.set()
        assert store.wait_until_quiet(SECONDS)
        while not answers:
            threading.Event().wait(0.001)
        assert answers == [StoreOutcome.LATE]
        assert loaded(store, [run]).num_runs == 1


def test_withdrawn_and_reset_content_is_not_served_after_a_restart_either(tmp_path: Path) -> None:
    runs = some_runs(4)
    with store_on(FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8)) as store:
        put(store, runs)
        assert store.withdraw(runs[2:3]) == 2
        assert (loaded(store, runs).num_runs, store.wait_until_quiet(SECONDS)) == (2, True)
    with store_on(FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8)) as store:
        assert loaded(store, runs).num_runs == 2
        assert store.reset() == 2
        assert store.wait_until_quiet(SECONDS)
    with store_on(FolderBody(tmp_path / "root", IDENTITY.fingerprint, 10**8)) as store:
        assert loaded(store, runs).num_runs == 0


def test_a_closed_store_answers_what_waits_and_refuses_more() -> None:
    runs = some_runs(3)
    body = TroubledBody(HostBody())
    store = store_on(body, max_reads=1, max_writes=1)
    put(store, runs)
    body.gate.clear()
    load = store.load(runs, 60.0)
    answers: list[StoreOutcome] = []
    more = some_runs(3, seed=9)
    store.offer(more, [parts_of(run) for run in more], lambda _place, outcome: answers.append(outcome))
    closing = threading.Thread(target=store.close)
    closing.start()
    assert load.wait(SECONDS).num_runs == 0
    body.gate.set()
    closing.join()
    assert len(answers) == 3
    with pytest.raises(ConfigurationError, match="the host tier is closed"):
        store.load(runs, 1.0)


def test_a_server_that_does_not_answer_at_start_is_refused_with_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"does not answer PING within 0\.2 s: unix:///"):
        RedisBody(f"unix://{tmp_path}/none", IDENTITY.fingerprint, timeout_s=0.2)
    with pytest.raises(ConfigurationError, match="Redis server of a tier does not answer"):
        RedisBody("nonsense://", IDENTITY.fingerprint)


@pytest.mark.parametrize(
    "url",
    [
        "redis://somebody:hidden@localhost:1/0",
        "redis://:hid/den@localhost:1/0",
        "redis://:hidden@@localhost:nonsense/0",
        "redis://localhost:1/0?username=somebody&password=hidden",
        "nonsense://:hidden@localhost:1",
    ],
)
def test_no_error_of_a_server_has_its_password(url: str) -> None:
    for make_one in (
        lambda: RedisBody(url, IDENTITY.fingerprint, timeout_s=0.2),
        lambda: ObjectBody(url, IDENTITY.fingerprint, timeout_s=0.2),
    ):
        with pytest.raises(ConfigurationError) as problem:
            make_one()
        text = "".join(traceback.format_exception(problem.value, limit=0))
        assert not {"hidden", "hid", "den", "somebody"} & set(re.split(r"[^a-z]+", text))
    tier = RedisTier(url, secret=bytes(32))
    assert not {"hidden", "hid", "den", "somebody"} & set(re.split(r"[^a-z]+", f"{tier!r} {tier.name}"))


def test_an_error_of_an_object_store_is_one_line() -> None:
    """It was pages of Rust."""
    options = s3_options("http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=r"Connection refused$") as problem:
        ObjectBody(f"s3://{BUCKET}/x", IDENTITY.fingerprint, timeout_s=1.0, **options)
    text = "".join(traceback.format_exception(problem.value, limit=0))
    assert "Debug source" not in text
    assert len(text.splitlines()) == 1


def test_a_value_of_another_type_in_redis_is_removed_and_stored_anew(redis_url: str) -> None:
    """It stayed listed: each request failed to load it, and nobody stored it."""
    runs = some_runs(2, seed=77)
    body = RedisBody(redis_url, IDENTITY.fingerprint, prefix="another type")
    with store_on(body) as store:
        put(store, runs)
        body._client.delete(body._name(runs[0].key))
        body._client.lpush(body._name(runs[0].key), b"another")
        causes = [loaded(store, runs[:1]).cause for _ in range(4)]
        assert causes == [LoadEnd.FAILED] * 3 + [LoadEnd.ABSENT]
        assert store.wait_until_quiet(SECONDS)
        assert put(store, runs) == {StoreOutcome.STORED: 1, StoreOutcome.PRESENT: 1}
        assert loaded(store, runs).num_runs == 2
        assert store.statistics().times_opened == 0


@pytest.mark.parametrize("server", [RedisServer, S3Server])
def test_a_server_that_is_slow_or_dies_costs_no_request_more_than_its_deadline_and_comes_back(
    server: type[RedisServer | S3Server], tmp_path: Path
) -> None:
    runs = some_runs(3)
    with closing(server(tmp_path)) as running:
        body: Body
        if isinstance(running, RedisServer):
            body = RedisBody(running.url, IDENTITY.fingerprint, timeout_s=0.5)
        else:
            body = ObjectBody(f"s3://{BUCKET}", IDENTITY.fingerprint, timeout_s=0.5, **s3_options(running.url))
        with store_on(body, breaker_failures=2, breaker_pause_s=0.02, breaker_longest_pause_s=0.05) as store:
            assert put(store, runs) == {StoreOutcome.STORED: 3}
            running.stop()
            assert loaded(store, runs, 0.2).num_runs == 0
            running.go_on()
            assert comes_back(store, runs) == 3
            running.kill()
            assert loaded(store, runs).cause in {LoadEnd.FAILED, LoadEnd.OUT_OF_SERVICE}
            until = time.monotonic() + SECONDS
            while not store.statistics().times_opened and time.monotonic() < until:
                loaded(store, runs)
            assert put(store, some_runs(2, seed=8)).keys() <= {StoreOutcome.FAILED, StoreOutcome.OUT_OF_SERVICE}
            running.start()
            assert comes_back(store, runs) == 0, "a new server has none of it"
            while loaded(store, runs).num_runs < 3:  # each load finds one more of them gone
                assert time.monotonic() < until, "what is lost is not stored again"
                put(store, runs)


def comes_back(store: TierStore, runs: list[Run]) -> int:
    """Load until the tier answers again; return how many runs it has."""
    until = time.monotonic() + SECONDS
    while (result := loaded(store, runs)).cause not in {LoadEnd.NONE, LoadEnd.GONE, LoadEnd.ABSENT}:
        assert time.monotonic() < until, "the tier does not come back"
        threading.Event().wait(0.005)
    return result.num_runs


def test_threads_that_store_and_load_at_random_meet_no_wrong_answer(tmp_path: Path) -> None:
    body = FolderBody(tmp_path / "root", IDENTITY.fingerprint, 30_000)
    with store_on(body, cap_nbytes=30_000, max_queued_nbytes=10_000) as store:
        problems: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for turn in range(25):
                    runs = some_runs(1 + (seed + turn) % 6, seed=(seed * 5 + turn * 3) % 11)
                    store.offer(runs, [parts_of(run) for run in runs])
                    loaded(store, runs, 5.0)
            except BaseException as problem:  # noqa: BLE001 - told by the test below
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert store.wait_until_quiet(SECONDS)
        store._core.check()
        assert body.usage().nbytes <= 30_000
        assert store.refusals == {}


def test_packages_that_are_missing_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _package.cache_clear()
    for name in ("xxhash", "redis", "obstore"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"a frame of a tier needs xxhash: pip install '\.\[tiers\]'"):
        write_frame(IDENTITY, some_runs(1)[0], parts_of(some_runs(1)[0]))
    with pytest.raises(MissingExtraError, match="a tier in Redis needs redis"):
        RedisBody("redis://localhost", IDENTITY.fingerprint)
    with pytest.raises(MissingExtraError, match="a tier in an object store needs obstore"):
        ObjectBody(f"file://{tmp_path}", IDENTITY.fingerprint)
    with store_on(HostBody()) as store:
        assert put(store, some_runs(1)) == {StoreOutcome.STORED: 1}


def test_nothing_is_left_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208, S108
    with store_on(HostBody()) as store:
        put(store, some_runs(5))
    assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208, S108


def test_what_a_store_wants_is_noted_once_and_is_offered_without_a_second_note() -> None:
    runs = some_runs(3)
    config = StoreConfig(cap_nbytes=2**20, max_entries=10)  # the second offer
    with TierStore(HostBody(), IDENTITY, config) as store:
        assert not store.select_for_offer(runs).any()
        assert store.select_for_offer(runs).all()
        store.offer(runs[:2], [parts_of(run) for run in runs[:2]], is_noted=True)
        assert store.wait_until_quiet(SECONDS)
        assert store.contains([run.key for run in runs]).tolist() == [True, True, False]
        assert store.select_for_offer(runs).tolist() == [False, False, True]
        store.withdraw(runs[2:])
        assert not store.select_for_offer(runs).any()
        assert not store.is_out_of_service
        assert store.room_nbytes == config.max_queued_nbytes


def test_a_load_tells_when_it_is_done_also_if_it_is_cancelled() -> None:
    runs = some_runs(2)
    config = StoreConfig(cap_nbytes=2**20, max_entries=10, admission="always")
    with TierStore(HostBody(), IDENTITY, config) as store:
        store.offer(runs, [parts_of(run) for run in runs])
        assert store.wait_until_quiet(SECONDS)
        done = threading.Event()
        load = store.load(runs, SECONDS, done.set)
        assert done.wait(SECONDS)
        store.cancel(load)  # too late, and no harm
        assert load.wait(SECONDS).num_runs == 2


def test_a_salt_has_its_share_of_a_store_and_evicts_its_own(tmp_path: Path) -> None:
    ours, theirs = (RequestKeys("tuned", "2", salt, SALTED.media) for salt in (b"ours", b"theirs"))
    nbytes = len(write_frame(IDENTITY, some_runs(1)[0], parts_of(some_runs(1)[0])))
    cap = 10 * nbytes + nbytes // 2
    body = FolderBody(tmp_path / "root", IDENTITY.fingerprint, cap)
    with store_on(body, cap_nbytes=cap, salt_share=0.4) as store:
        kept = some_runs(2, keys=theirs)
        assert put(store, kept) == {StoreOutcome.STORED: 2}
        for seed in range(1, 6):
            put(store, some_runs(2, keys=ours, seed=seed))
            assert store.wait_until_quiet(SECONDS)
        assert loaded(store, kept).num_runs == 2
        there = [loaded(store, some_runs(2, keys=ours, seed=seed)).num_runs for seed in range(1, 6)]
        assert there == [0, 0, 0, 2, 2]
        assert body.usage().nbytes <= 6 * nbytes
