"""Our publisher of KV events, read by vLLM's own classes, subscriber and example."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import vllm
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from pagedkv import FullAttention, GroupSpec, MediaSpan, RequestKeys, SlidingWindow, hash_block_tokens
from pagedkv.blocks.digests import ROOT_DIGEST
from pagedkv.contract.answers import REMOVED, STORED, TierEvents
from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.spec import ChunkedLocal, RecurrentState
from pagedkv.events import EventFollower, EventPublisher
from pagedkv.wire import Applied
from tests.space.spaces import cache, new_space, tokens

THEIRS: Final = Path(vllm.__file__).parents[1]
GROUPS: Final[tuple[GroupSpec, ...]] = (
    FullAttention(4),
    SlidingWindow(6, 4),
    ChunkedLocal(8, 4),
    RecurrentState(8, pool="state"),
)
LOCAL: Final = "tcp://127.0.0.1:*"
PATIENCE_MS: Final = 60_000
MEDIA: Final = ("CPU", "FOLDER", "REDIS", "OBJECT")
RUN_TOKENS: Final = 32
KEYS: Final = RequestKeys("sql", "v2", b"tenant-a", (MediaSpan(3, 3, b"image"),))


def their_subscriber() -> ModuleType:
    """Load the helpers of vLLM's tests of events."""
    folder = THEIRS / "tests" / "distributed"
    package = ModuleType("their_distributed_tests")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.conftest", folder / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def subscribed(publisher: EventPublisher, topic: str = "") -> Iterator[Any]:
    """Subscribe as vLLM's tests do, and wait until a message comes."""
    assert publisher.replay_endpoint is not None
    subscriber = their_subscriber().MockSubscriber(
        publisher.endpoint, publisher.replay_endpoint, topic, decode_type=KVEventBatch
    )
    try:
        assert subscriber.receive_one(PATIENCE_MS) is not None
        yield subscriber
    finally:
        subscriber.close()


def serve(publisher: EventPublisher, num_prompts: int) -> int:
    """Cache prompts with and without extra keys in a small cache, and clear it once; return how many batches it was."""
    space = new_space(*GROUPS, num_blocks={"device": 60, "state": 9}, max_tokens=90, events=True)
    draw = np.random.default_rng(5)
    num_batches = 0
    for each in range(num_prompts):
        if each == num_prompts // 2:
            space.reset_prefix_cache()
        first, length = 100 * int(draw.integers(5)), int(draw.integers(6, 40))
        cache(space, tokens(length, first=first), KEYS if draw.random() < 0.3 else NO_KEYS)
        events = space.drain_events()
        num_batches += any(map(len, events))
        publisher.publish(events, space)
    publisher.serve_snapshots(lambda: publisher.snapshot(space))
    return num_batches


def encoded_by_them(batch: KVEventBatch) -> bytes:
    return msgspec.msgpack.Encoder().encode(batch)


def test_their_classes_read_every_message_and_write_the_same_bytes() -> None:
    with (
        EventPublisher(LOCAL, LOCAL, groups=GROUPS, topic="kv", rank=2, heartbeat_s=0.05) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.subscribe(b"")
        socket.connect(publisher.endpoint)
        assert socket.poll(PATIENCE_MS)
        num_wanted = serve(publisher, 80)
        kinds: set[type] = set()
        num_batches = num_beats = 0
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while num_batches < num_wanted or num_beats < 3:
            assert socket.poll(PATIENCE_MS)
            topic, number, payload = socket.recv_multipart()
            assert (topic, len(number)) == (b"kv", 8)
            batch = decoder.decode(payload)
            assert batch.data_parallel_rank == 2
            assert time.time() - 60 < batch.ts <= time.time()
            theirs = encoded_by_them(batch)
            assert payload[1:] == theirs[1:] + msgspec.msgpack.encode(publisher.lifetime)
            assert (payload[0], theirs[0]) == (0x94, 0x93)
            kinds |= {type(event) for event in batch.events}
            num_batches, num_beats = num_batches + bool(batch.events), num_beats + (not batch.events)
            for event in batch.events:
                require_theirs(event)
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}


def require_theirs(event: Any) -> None:  # noqa: ANN401 - of their classes
    """Check what vLLM's consumers rely on, and that digests follow from tokens where there are no extra keys."""
    if isinstance(event, BlockStored):
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.medium == "GPU"
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(event.block_hashes)
        assert KVCacheSpecKind(event.kv_cache_spec_kind)
        assert (event.kv_cache_spec_sliding_window is None) == (event.kv_cache_spec_kind != "sliding_window")
        assert {key[0] for key in event.extra_keys if key} <= {event.lora_name}
        if event.parent_block_hash is None and event.extra_keys[0] is None:
            assert hash_block_tokens(ROOT_DIGEST, event.token_ids[: event.block_size]) == event.block_hashes[0]


@pytest.mark.parametrize("topic", ["", "kv-events"])
def test_their_subscriber_misses_nothing_and_gets_it_again(topic: str) -> None:
    options: dict[str, Any] = {"groups": GROUPS, "topic": topic, "heartbeat_s": 0.05}
    with EventPublisher(LOCAL, LOCAL, **options) as publisher, subscribed(publisher, topic) as subscriber:
        num_wanted = serve(publisher, 30)
        while sum(bool(batch.events) for _, batch in subscriber.received_msgs) < num_wanted:
            assert subscriber.receive_one(PATIENCE_MS) is not None
        numbers = [number for number, _ in subscriber.received_msgs]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        subscriber.request_replay(0)
        again = dict(subscriber.receive_replay())
        assert sorted(again) == list(range(len(again)))
        assert all(again[number] == batch for number, batch in subscriber.received_msgs)
        subscriber.request_replay(numbers[-1] + 1000)
        assert subscriber.receive_replay() == []


def test_their_decoder_reads_a_snapshot_too() -> None:
    with (
        EventPublisher(LOCAL, LOCAL, groups=GROUPS, heartbeat_s=0.05) as publisher,
        subscribed(publisher) as subscriber,
    ):
        serve(publisher, 30)
        (socket,) = subscriber.replay_sockets
        socket.send_multipart([b"", b"snapshot"])
        parts = subscriber.receive_replay()
        assert len({number for number, _ in parts}) == 1
        hashes = {(event.group_idx, each) for _, part in parts for event in part.events for each in event.block_hashes}
        assert len(hashes) > 20
        again = next(part for _, part in parts)
        assert all(isinstance(event, BlockStored) for event in again.events)


def entries(medium: str, kind: int, *seeds: int) -> TierEvents:
    """Return events of entries with keys drawn from seeds."""
    keys = np.stack([np.random.default_rng(seed).integers(0, 256, 32, np.uint8) for seed in seeds])
    return TierEvents(medium, RUN_TOKENS, np.full(len(seeds), kind, np.int32), keys)


def test_their_classes_read_entries_of_tiers_by_medium() -> None:
    """As their own events of offloaded blocks: a medium, hashes, no tokens and no parent; also in a snapshot."""
    space = new_space(*GROUPS, num_blocks={"device": 60, "state": 9}, max_tokens=90, events=True)
    listed = [entries(medium, STORED, *range(10 * place, 10 * place + 5)) for place, medium in enumerate(MEDIA)]
    gone = entries("REDIS", REMOVED, 20, 23)
    with (
        EventPublisher(LOCAL, LOCAL, groups=GROUPS, heartbeat_s=0.05) as publisher,
        subscribed(publisher) as subscriber,
    ):
        cache(space, tokens(20))
        publisher.publish(space.drain_events(), space, listed)
        publisher.publish(space.drain_events(), space, [gone])
        publisher.serve_snapshots(lambda: publisher.snapshot(space, listed))
        there: dict[str, set[bytes]] = {}
        while not any(
            isinstance(event, BlockRemoved) for _, batch in subscriber.received_msgs for event in batch.events
        ):
            assert subscriber.receive_one(PATIENCE_MS) is not None
        for _, batch in subscriber.received_msgs:
            for event in batch.events:
                own = there.setdefault(event.medium, set())
                if isinstance(event, BlockRemoved):
                    assert own >= set(event.block_hashes)
                    own -= set(event.block_hashes)
                    continue
                own |= set(event.block_hashes)
                if event.medium != "GPU":
                    assert (event.token_ids, event.parent_block_hash, event.block_size) == ([], None, RUN_TOKENS)
        wanted = {each.medium: {key.tobytes() for key in each.keys} for each in listed}
        wanted["REDIS"] -= {key.tobytes() for key in gone.keys}
        assert {medium: keys for medium, keys in there.items() if medium != "GPU"} == wanted
        assert there["GPU"]
        (socket,) = subscriber.replay_sockets
        socket.send_multipart([b"", b"snapshot"])
        events = [event for _, part in subscriber.receive_replay() for event in part.events]
        assert {event.medium for event in events} == {"GPU", *MEDIA}
        assert sum(len(event.block_hashes) for event in events if event.medium != "GPU") == 5 * len(MEDIA)


def test_their_example_prints_every_batch() -> None:
    """Its ports and its topic are ours; everything else is as it is."""
    source = (THEIRS / "examples/features/kv_events/kv_events_subscriber.py").read_text()
    with EventPublisher(LOCAL, LOCAL, groups=GROUPS, topic="kv-events", heartbeat_s=0.1) as publisher:
        assert publisher.replay_endpoint is not None
        for theirs, ours in (("localhost:5557", publisher.endpoint), ("localhost:5558", publisher.replay_endpoint)):
            assert theirs in source
            source = source.replace(theirs, ours.removeprefix("tcp://"))
        command = [sys.executable, "-u", "-W", "ignore", "-c", source]
        example = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            lines = _lines(example)
            assert any("Received event batch" in line for line in lines), "a heartbeat"
            serve(publisher, 20)
            told = []
            for line in lines:
                told.append(line)
                if "AllBlocksCleared" in line:
                    break
            assert any("BlockStored" in line for line in told)
            assert not [line for line in told if "Error" in line]
        finally:
            example.kill()
            example.communicate()


def _lines(process: "subprocess.Popen[str]") -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


def test_their_publisher_has_no_snapshot_and_is_not_taken_for_ours(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    theirs = ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(replay)
            socket.send_multipart([b"", b"snapshot"])
            assert socket.poll(PATIENCE_MS)
            assert socket.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        with EventFollower(endpoint, replay, GROUPS) as follower:
            _follow(theirs, follower)
            assert not follower.is_whole
            assert follower.unnamed is not None
    finally:
        theirs.shutdown()


def _follow(theirs: ZmqEventPublisher, follower: EventFollower) -> None:
    until = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < until:
        theirs.publish(KVEventBatch(ts=time.time(), events=[AllBlocksCleared()]))
        if any(isinstance(message, Applied) for message in follower.poll(0.01)):
            return
    pytest.fail("no batch was followed")
