"""Recordings of SGLang's own publisher and radix cache, against what these say themselves."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.peers.sglang_engine import PAGE_SIZE, SglangEngine  # isort: skip - SGLang comes behind what stands in for it
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockStored, KVEventBatch, StorageMedium

from pagedkv.events import Endpoints, Subscription
from pagedkv.planner.recording.metrics import MetricsFollower
from pagedkv.planner.recording.recorder import Bounds, Ending, Recorder
from tests.cli.command import run
from tests.peers.counting import residents
from tests.peers.publishing import LossySubscription, followed, recorded, there
from tests.peers.sglang_metrics import SglangPage
from tests.recording.publisher import doing


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[SglangEngine]:  # noqa: ANN401 - the engine's own
    engine = SglangEngine(folder, **options)
    try:
        yield engine
    finally:
        engine.wire.close()


def endpoints_of(engine: SglangEngine) -> Endpoints:
    return Endpoints(engine.endpoint, engine.replay)


def serving(engine: SglangEngine, num: int, *, seed: int = 1) -> Callable[[], None]:
    """Serve prompts of four families, which leave them at several places; some of an adapter."""
    draw = random.Random(seed)

    def work() -> None:
        for each in range(num):
            shared = [1000 * draw.randrange(4) + place for place in range(draw.choice((4, 8, 12)))]
            engine.serve([*shared, *([50_000 + each] * draw.choice((1, 4, 9)))], draw.choice((None, None, "a")))

    return work


def check(recorder: Recorder, engine: SglangEngine) -> None:
    found = there(recorder)
    assert found == residents(engine.batches(), frozenset({"GPU", "CPU_PINNED"}))
    copies = recorder.residency._copies  # pages of the same name: of two adapters, say
    assert len(found.get("GPU", ())) + sum(copies.values()) == engine.num_cached()


def test_stores_and_removes_of_a_small_cache(tmp_path: Path) -> None:
    with engine_of(tmp_path, num_pages=30) as engine:
        recorder = recorded(engine.wire, endpoints_of(engine), serving(engine, 200))
        check(recorder, engine)
        gpu = recorder.residency.media["GPU"]
        assert recorder.residency.is_exact
        assert gpu.num_removed > 100
        assert (gpu.num_removed_unseen, recorder.contents.num_unknown) == (0, 0)
        assert recorder.contents.block_size == PAGE_SIZE


def test_a_clear(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:

        def work() -> None:
            serving(engine, 20)()
            engine.clear()
            serving(engine, 3, seed=2)()

        recorder = recorded(engine.wire, endpoints_of(engine), work)
        assert recorder.residency.num_clears == 2  # a cache of SGLang's begins with one
        check(recorder, engine)


def test_gaps_are_filled_by_what_is_sent_again(tmp_path: Path) -> None:
    with engine_of(tmp_path, num_pages=30) as engine:
        recorder = recorded(engine.wire, endpoints_of(engine), serving(engine, 60), LossySubscription)
        assert (recorder.gaps, recorder.num_restarts) == ([], 0)
        assert recorder.num_requested_again > 20
        check(recorder, engine)


def test_an_idle_engine_tells_what_it_holds_however_much_it_has_to_send_again(tmp_path: Path) -> None:
    """Its queue for what is sent again holds 1,000 messages, and drops what goes beyond."""
    with engine_of(tmp_path, num_pages=100_000) as engine:
        serving(engine, 5000)()
        with Subscription(endpoints_of(engine)) as subscription:
            recorder = Recorder(subscription, time.time)
            assert recorder.run(Bounds(), is_over=lambda: subscription.is_connected) is Ending.ASKED
        assert recorder.gaps == []
        assert recorder.num_messages == engine.num_batches
        check(recorder, engine)


def test_a_publisher_that_is_started_again(tmp_path: Path) -> None:
    first = SglangEngine(tmp_path)
    engines: list[SglangEngine] = []
    is_over: list[bool] = []

    def live() -> None:
        first.wire.await_subscriber()
        serving(first, 20)()
        first.wire.beat_until(lambda: recorder.num_messages >= first.num_batches)
        first.wire.close()
        second = SglangEngine(tmp_path)
        engines.append(second)
        serving(second, 40, seed=3)()
        is_all = lambda: recorder.num_restarts > 0 and recorder._numbers.expected >= second.num_batches  # noqa: E731
        second.wire.beat_until(is_all)
        is_over.append(True)

    with Subscription(endpoints_of(first)) as subscription:
        recorder = Recorder(subscription, time.time)
        with doing(live):
            recorder.run(Bounds(duration_s=60), is_over=lambda: bool(is_over))
    assert (recorder.num_restarts, recorder.gaps) == (1, [])
    check(recorder, engines[0])
    engines[0].wire.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_data_parallel_rank_is_named(tmp_path: Path, *, rank: int) -> None:
    """At endpoints that need no offset; those of vLLM's ranks, which are counted alike, have one."""
    told = {
        "endpoint": "ipc://" + str(tmp_path / "inproc"),
        "replay_endpoint": "ipc://" + str(tmp_path / "inproc-again"),
    }
    found = tmp_path / "found.json"
    with engine_of(tmp_path, rank=rank, **told) as engine:

        def work() -> None:
            for each in range(40):
                engine.serve([*range(4 * (each % 5)), *([10_000 + each] * 5)])

        replay = engine.wire.publisher._replay_endpoint
        options = ("--replay", replay, "--limit", 40, "--json", found)
        with followed(engine.wire, work):
            result = run("record", engine.wire.publisher._endpoint, *options)
        assert result.exit_code == 0, result.stderr
        document = json.loads(found.read_text())
        assert document["rank"] == rank
        assert document["blocks"]["GPU"]["num_blocks"] == engine.num_cached()


def test_a_clear_empties_the_host_memory_too(tmp_path: Path) -> None:
    """As `UnifiedRadixCache.reset` does, and tells by one event."""
    fields: dict[str, Any] = {"parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4, "lora_id": None}
    stores = [BlockStored(block_hashes=[-7], medium=medium, **fields) for medium in StorageMedium]
    with engine_of(tmp_path) as engine:

        def work() -> None:
            for events in (stores, [AllBlocksCleared()]):
                engine.wire.publish(KVEventBatch(ts=time.time(), events=list(events)))

        recorder = recorded(engine.wire, endpoints_of(engine), work)
        assert there(recorder) == {"DISK": {(0, -7)}, "EXTERNAL": {(0, -7)}}
        assert there(recorder) == residents(engine.batches(), frozenset({"GPU", "CPU_PINNED"}))


def test_the_metrics_page_tells_hits_of_all_sources_and_who_waits_once(tmp_path: Path) -> None:
    page = SglangPage("m")
    with engine_of(tmp_path) as engine, page.served() as url:
        page.stepped({}, 0.0)
        follower = MetricsFollower(url, 1.0)
        follower.begin()  # no counter is there yet
        asked = 0
        for number in range(30):
            prompt = [*range(4 * (number % 5)), *([60_000 + number] * 5)]
            engine.serve(prompt)
            asked += len(prompt)
            page.finished(len(prompt), engine.hits[-1], num_host=min(4, engine.hits[-1]) if number % 2 else 0)
        page.stepped({1: 2, 7: 3}, 0.5)
        follower.read_once_more()
    assert follower.metrics.gained["queries"] == asked
    assert follower.metrics.gained["hits"] == sum(engine.hits) > 100
    assert follower.metrics.hit_ratio == sum(engine.hits) / asked
    assert (follower.metrics.peaks["waiting"], follower.metrics.peaks["usage"]) == (5, 0.5)
