"""Recordings of vLLM's own publisher and cache manager, against what these say themselves."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from pagedkv.errors import RecordingError
from pagedkv.events import Endpoints, Subscription
from pagedkv.planner.recording.metrics import MetricsFollower
from pagedkv.planner.recording.recorder import Bounds, Ending, Recorder
from tests.cli.command import run
from tests.peers.counting import residents
from tests.peers.publishing import LossySubscription, followed, recorded, there
from tests.peers.vllm_engine import BLOCK_SIZE, VllmEngine
from tests.peers.vllm_metrics import VllmPage
from tests.recording.publisher import doing


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[VllmEngine]:  # noqa: ANN401 - the engine's own
    engine = VllmEngine(folder, **options)
    try:
        yield engine
    finally:
        engine.wire.close()


def endpoints_of(engine: VllmEngine) -> Endpoints:
    return Endpoints(engine.endpoint, engine.replay)


def serving(engine: VllmEngine, num: int, *, seed: int = 1) -> Callable[[], None]:
    """Serve prompts of four families: many are equal, many end with a block, and all go on in the same way."""
    draw = random.Random(seed)
    firsts = [draw.randrange(4) for _ in range(num)]
    prompts = [[1000 * first + place for place in range(draw.choice((3, 4, 8, 12, 17, 22)))] for first in firsts]

    def work() -> None:
        for prompt in prompts:
            engine.serve(prompt, [prompt[0] + 500] * 6)

    return work


@pytest.mark.parametrize("has_window", [False, True], ids=["one-group", "two-groups"])
def test_stores_and_removes_of_a_small_cache(tmp_path: Path, *, has_window: bool) -> None:
    with engine_of(tmp_path, num_blocks=30, has_window=has_window) as engine:
        recorder = recorded(engine.wire, endpoints_of(engine), serving(engine, 200))
        assert recorder.residency.is_exact
        assert there(recorder) == residents(engine.batches()) == engine.cached()
        gpu = recorder.residency.media["GPU"]
        assert gpu.num_removed > 100
        assert gpu.num_copies > 10
        assert gpu.num_removed_unseen == 0
        assert recorder.contents.block_size == BLOCK_SIZE


def test_a_clear(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:

        def work() -> None:
            serving(engine, 20)()
            engine.clear()
            serving(engine, 3, seed=2)()

        recorder = recorded(engine.wire, endpoints_of(engine), work)
        assert recorder.residency.num_clears == 1
        assert there(recorder) == residents(engine.batches()) == engine.cached()


def test_gaps_are_filled_by_what_is_sent_again(tmp_path: Path) -> None:
    with engine_of(tmp_path, num_blocks=30) as engine:
        recorder = recorded(engine.wire, endpoints_of(engine), serving(engine, 60), LossySubscription)
        assert (recorder.gaps, recorder.num_restarts) == ([], 0)
        assert recorder.num_requested_again > 20
        assert there(recorder) == residents(engine.batches()) == engine.cached()


def test_an_idle_engine_tells_what_it_holds(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        serving(engine, 30)()
        with Subscription(endpoints_of(engine)) as subscription:
            recorder = Recorder(subscription, time.time)
            assert recorder.run(Bounds(), is_over=lambda: subscription.is_connected) is Ending.ASKED
        assert recorder.num_requested_again == recorder.num_messages == engine.num_batches
        assert there(recorder) == engine.cached()


def test_a_gap_that_the_publisher_no_longer_has_is_told(tmp_path: Path) -> None:
    with engine_of(tmp_path, buffer_steps=2) as engine:

        def work() -> None:
            engine.wire.beat_until(lambda: engine.wire.num_published >= 10)
            serving(engine, 60)()

        recorder = recorded(engine.wire, endpoints_of(engine), work, LossySubscription)
        assert recorder.num_gaps > 2
        assert not recorder.residency.is_exact
        lost = {number for gap in recorder.gaps for number in range(gap.first, (gap.last or gap.first) + 1)}
        assert lost
        assert recorder.num_messages + len(lost) >= engine.num_batches


def test_a_publisher_that_is_started_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = VllmEngine(tmp_path)
        second: list[VllmEngine] = []

        def live() -> None:
            first.wire.await_subscriber()
            serving(first, 20)()
            first.wire.beat_until(lambda: recorder.num_messages >= first.num_batches)
            first.wire.close()
            second.append(stack.enter_context(engine_of(tmp_path)))
            serving(second[0], 40, seed=3)()
            is_all = lambda: recorder.num_restarts > 0 and recorder._numbers.expected >= second[0].num_batches  # noqa: E731
            second[0].wire.beat_until(is_all)
            is_over.append(True)

        is_over: list[bool] = []
        with Subscription(endpoints_of(first)) as subscription:
            recorder = Recorder(subscription, time.time)
            with doing(live):
                recorder.run(Bounds(duration_s=60), is_over=lambda: bool(is_over))
        assert (recorder.num_restarts, recorder.gaps) == (1, [])
        assert recorder.residency.is_exact
        assert there(recorder) == residents(second[0].batches()) == second[0].cached()


def free_ports() -> int:
    """Find four free ports in a row, and give the first."""
    while True:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(4)]
            sockets[0].bind(("127.0.0.1", 0))
            first: int = sockets[0].getsockname()[1]
            try:
                for place, each in enumerate(sockets[1:], 1):
                    each.bind(("127.0.0.1", first + place))
            except OSError:
                continue
            return first


def test_each_data_parallel_rank_is_recorded_by_itself_and_named(tmp_path: Path) -> None:
    port = free_ports()
    told = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 2}"}
    for rank in range(2):
        found = tmp_path / f"{rank}.json"
        with engine_of(tmp_path, rank=rank, num_blocks=30, **told) as engine:
            options = ("--replay", f"tcp://127.0.0.1:{port + 2 + rank}", "--limit", 40, "--json", found)
            with followed(engine.wire, unique(engine, 40, rank)):
                result = run("record", f"tcp://127.0.0.1:{port + rank}", *options)
            assert result.exit_code == 0, result.stderr
            document = json.loads(found.read_text())
            assert document["rank"] == rank
            assert document["blocks"]["GPU"]["num_blocks"] == len(engine.cached()["GPU"])


def unique(engine: VllmEngine, num: int, name: int = 0) -> Callable[[], None]:
    """Serve prompts that share a beginning and end each in its own way, so that every one makes one batch."""

    def work() -> None:
        for each in range(num):
            engine.serve([*range(4 * (each % 5)), *([10_000 * (name + 1) + each] * 5)])

    return work


def test_adapters_tell_blocks_apart(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:

        def work() -> None:
            for adapter in (None, "a", "other", "a"):
                engine.serve(range(9), adapter=adapter)

        recorder = recorded(engine.wire, endpoints_of(engine), work)
        assert engine.hits == [0, 0, 0, 8]
        assert there(recorder) == residents(engine.batches()) == engine.cached()
        stores = [event for batch in engine.batches() for event in batch.events if isinstance(event, BlockStored)]
        assert recorder.contents.num_with_keys == sum(len(each.block_hashes) for each in stores if each.lora_name) == 4


def test_blocks_that_connectors_offloaded(tmp_path: Path) -> None:
    """What vLLM's connectors say of them without tokens and size, and a clear, which leaves them."""
    fields: dict[str, Any] = {"parent_block_hash": None, "lora_id": None, "lora_name": None}
    device = BlockStored(block_hashes=[1, 2], token_ids=[*range(8)], block_size=4, medium="GPU", group_idx=0, **fields)
    offloaded = BlockStored(block_hashes=[2], token_ids=[], block_size=0, medium="CPU", group_idx=0, **fields)
    far = BlockStored(
        block_hashes=[b"2"], token_ids=[], block_size=0, medium="STORAGE", locality="REMOTE", ownership="fs", **fields
    )
    gone = BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0)
    with engine_of(tmp_path) as engine:

        def work() -> None:
            for events in ([device, offloaded], [far, gone], [AllBlocksCleared()]):
                engine.wire.publish(KVEventBatch(ts=time.time(), events=events))

        recorder = recorded(engine.wire, endpoints_of(engine), work)
        assert recorder.gaps == []
        found = there(recorder)
        assert found == {"CPU": {(0, 2)}, "STORAGE (fs, remote)": {(0, b"2")}}
        counted = residents(engine.batches())
        assert {medium.split()[0]: blocks for medium, blocks in found.items()} == counted
        assert recorder.contents.block_size == 4


@contextmanager
def connecting(folder: Path, topics: tuple[str, ...]) -> Iterator[tuple[str, list[VllmEngine]]]:
    """Engines whose endpoint names a machine, as they connect to one subscriber."""
    port = free_ports()
    with ExitStack() as stack:
        engines = []
        for number, topic in enumerate(topics):
            own = folder / str(number)
            own.mkdir()
            told = {"endpoint": f"tcp://127.0.0.1:{port}", "topic": topic}
            engines.append(stack.enter_context(engine_of(own, **told)))
        yield f"tcp://127.0.0.1:{port}", engines


def test_engines_that_connect_are_told_apart_by_topic(tmp_path: Path) -> None:
    with connecting(tmp_path, ("kv@10.0.0.1@m", "kv@10.0.0.2@m")) as (endpoint, engines):
        wanted, other = engines
        endpoints = Endpoints(endpoint, wanted.replay, topic="kv@10.0.0.1", bind=True)
        is_other_served = threading.Event()

        def work_of_other() -> None:
            serving(other, 30, seed=5)()
            is_other_served.set()

        def work() -> None:
            assert is_other_served.wait(60)
            serving(wanted, 30)()

        with followed(other.wire, work_of_other):
            recorder = recorded(wanted.wire, endpoints, work)
        assert (recorder.gaps, recorder.num_restarts) == ([], 0)
        assert there(recorder) == residents(wanted.batches()) == wanted.cached() != other.cached()


def test_engines_that_connect_and_are_not_told_apart_are_refused(tmp_path: Path) -> None:
    with (
        connecting(tmp_path, ("kv@10.0.0.1@m", "kv@10.0.0.2@m")) as (endpoint, engines),
        followed(engines[0].wire, serving(engines[0], 3)),
        followed(engines[1].wire, serving(engines[1], 3)),
        Subscription(Endpoints(endpoint, topic="kv@", bind=True)) as subscription,
        pytest.raises(RecordingError, match=r"message \d+ has the topic 'kv@.*`topic`"),
    ):
        Recorder(subscription, time.time).run(Bounds(duration_s=60))


def log_row(number: int, prompt: list[int], at_s: float) -> str:
    """Give the row of a request in the form of SGLang's request log, whose times are exact."""
    told = {"rid": str(number), "timestamp": at_s, "obj": {"input_ids": prompt}}
    out = {"meta_info": {"prompt_tokens": len(prompt), "completion_tokens": 1}}
    received = json.dumps({"event": "request.received", **told})
    return received + "\n" + json.dumps({"event": "request.finished", **told, "out": out}) + "\n"


def test_hits_of_the_joined_trace_are_the_engines(tmp_path: Path) -> None:
    log, output, found = tmp_path / "server.jsonl", tmp_path / "trace.jsonl", tmp_path / "found.json"
    with engine_of(tmp_path) as engine, log.open("w") as rows:

        def work() -> None:
            for number in range(60):
                prompt = [*range(4 * (number % 7)), *([50_000 + number] * (number % 3 + 5))]
                rows.write(log_row(number, prompt, time.time()))
                rows.flush()
                engine.serve(prompt)

        rows.write(log_row(1000, [1, 2, 3], time.time() - 1e6))
        options = ("--replay", engine.replay, "--limit", 60, "--log", log, "-o", output, "--json", found)
        with followed(engine.wire, work):
            result = run("record", engine.endpoint, *options)
        assert result.exit_code == 0, result.stderr
        document = json.loads(found.read_text())
        assert document["blocks"]["GPU"]["num_blocks"] == len(engine.cached()["GPU"])
        assert (document["log"]["num_taken"], document["log"]["num_outside"]) == (60, 1)
        assert document["log"]["num_stored"] == document["log"]["num_blocks"] > 60
        replayed = json.loads(run("replay", output, "--num-blocks", 2000, "--block-size", 4, "--json", "-").stdout)
        assert replayed["hits"]["num_hit_tokens"] == sum(engine.hits) > 0


def test_the_metrics_page_tells_the_hits_of_all_ranks_on_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        engines = {}
        for rank in range(2):
            own = tmp_path / str(rank)
            own.mkdir()
            engines[rank] = stack.enter_context(engine_of(own))
        page = VllmPage(engines)
        serving(engines[0], 5)()  # before the recording
        page.tell()
        url = stack.enter_context(page.served())
        follower = MetricsFollower(url, 1.0)
        follower.begin()
        before = sum(engines[0].hits)
        for rank, engine in engines.items():
            serving(engine, 40, seed=rank + 2)()
            page.tell(num_running=3 + rank, num_waiting=rank)
            follower.read_once_more()
        hits = sum(sum(engine.hits) for engine in engines.values()) - before
        asked = sum(sum(engine.num_prompt_tokens) for engine in engines.values()) - sum(
            engines[0].num_prompt_tokens[:5]
        )
        assert follower.metrics.gained == {"queries": asked, "hits": hits, "preemptions": 0}
        assert follower.metrics.hit_ratio == hits / asked > 0.3
        assert follower.metrics.num_blocks == 2000
        assert follower.metrics.peaks["running"] == 8  # of both ranks
        assert follower.metrics.peaks["waiting"] == 2
        assert "usage" in follower.metrics.means


def log_row_with_answer(number: int, prompt: list[int], output: list[int], at_s: float) -> str:
    """Give the row of a request in the form of SGLang's request log, with the tokens of its answer."""
    told = {"rid": str(number), "timestamp": at_s, "obj": {"input_ids": prompt}}
    meta = {"prompt_tokens": len(prompt), "completion_tokens": len(output)}
    received = json.dumps({"event": "request.received", **told})
    finished = {"event": "request.finished", **told, "out": {"output_ids": output, "meta_info": meta}}
    return received + "\n" + json.dumps(finished) + "\n"


def blocks_of(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)}


def test_hits_on_generated_blocks_of_the_joined_trace_are_the_engines(tmp_path: Path) -> None:
    """Conversations, whose next prompt has the answer in it."""
    log, output, found = tmp_path / "server.jsonl", tmp_path / "trace.jsonl", tmp_path / "found.json"
    of_prompts: set[tuple[int, ...]] = set()
    of_answers: set[tuple[int, ...]] = set()
    from_answers: set[tuple[int, ...]] = set()
    with engine_of(tmp_path) as engine, log.open("w") as rows:

        def work() -> None:
            conversations = {name: [name * 1000 + place for place in range(5 + name)] for name in range(1, 5)}
            for number in range(40):
                name = number % 4 + 1
                prompt = conversations[name] + [900_000 + number] * (number % 3 + 1)
                answer = [500_000 + 100 * number + place for place in range(4 + number % 5)]
                rows.write(log_row_with_answer(number, prompt, answer, time.time()))
                rows.flush()
                engine.serve(prompt, answer)
                blocks = blocks_of(prompt)
                from_answers.update((blocks & of_answers) - of_prompts)
                of_prompts.update(blocks)
                of_answers.update(blocks_of(prompt + answer[:-1]) - blocks)
                conversations[name] = prompt + answer

        options = (
            "--replay",
            engine.replay,
            "--limit",
            40,
            "--log",
            log,
            "-o",
            output,
            "--json",
            found,
            "--keep-tokens",
        )
        with followed(engine.wire, work):
            result = run("record", engine.endpoint, *options)
        assert result.exit_code == 0, result.stderr
        assert json.loads(found.read_text())["log"]["num_generated"] == len(from_answers) > 40
        one_by_one = ("--num-blocks", 2000, "--block-size", 4, "--cost-model", "instant")
        replayed = json.loads(run("replay", output, *one_by_one, "--json", "-").stdout)
        assert replayed["hits"]["num_hit_tokens"] == sum(engine.hits) > 500
