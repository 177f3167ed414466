"""A publisher and its followers over real sockets: what comes, what comes again, and what a snapshot repairs."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import zmq

from pagedkv import BlockSpace, FullAttention, GroupSpec, SlidingWindow
from pagedkv.errors import ConfigurationError, EngineError, RecordingError
from pagedkv.events import (
    Alive,
    Applied,
    EventFollower,
    EventPublisher,
    FollowedMessage,
    FollowingRules,
    Snapshot,
    follow,
)
from pagedkv.routing import IndexState, ReplicaIndex
from pagedkv.wire import Message
from tests.space.spaces import cache, new_space, tokens

GROUPS: Final[tuple[GroupSpec, ...]] = (FullAttention(4), SlidingWindow(6, 4))
LOCAL: Final = "tcp://127.0.0.1:*"
PATIENCE_S: Final = 20.0
PATIENCE_MS: Final = 20_000
BEAT_S: Final = 0.02
RULES: Final = FollowingRules(patience_s=PATIENCE_S, retry_s=0.05)


class Replica:
    """A block space, the publisher of its events, and what a follower's index makes of them."""

    def __init__(self, endpoint: str = LOCAL, replay: str | None = LOCAL, **options: Any) -> None:  # noqa: ANN401 - of the publisher
        self.space: BlockSpace = new_space(*GROUPS, num_blocks=60, max_tokens=90, events=True)
        self.publisher = EventPublisher(endpoint, replay, groups=GROUPS, **{"heartbeat_s": BEAT_S, **options})
        self.publisher.serve_snapshots(lambda: self.publisher.snapshot(self.space))

    def serve(self, first: int, num_tokens: int = 40) -> None:
        """Cache a prompt, and publish what changed."""
        cache(self.space, tokens(num_tokens, first=first))
        self.publisher.publish(self.space.drain_events(), self.space)

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached."""
        return len(self.space.stored_blocks())


@contextmanager
def replica_of(*arguments: Any, **options: Any) -> Iterator[Replica]:  # noqa: ANN401 - of Replica
    replica = Replica(*arguments, **options)
    with replica.publisher:
        yield replica


class Watcher:
    """A follower and its index."""

    def __init__(self, replica: Replica, *, replays: bool = True, **options: Any) -> None:  # noqa: ANN401 - of the follower
        publisher = replica.publisher
        replay = publisher.replay_endpoint if replays else None
        self.follower = EventFollower(publisher.endpoint, replay, GROUPS, **{"rules": RULES, **options})
        self.index = ReplicaIndex(GROUPS)
        self.index.add_replica("a")
        self.messages: list[FollowedMessage] = []

    def watch_until(self, is_enough: Callable[[], bool]) -> None:
        """Poll at least once, and until it is."""
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            for message in self.follower.poll(0.01):
                self.messages.append(message)
                follow(self.index, "a", message, time.monotonic())
            if is_enough():
                return
            assert time.monotonic() < ends_at, self.index.view("a")

    def catch_up(self, replica: Replica) -> None:
        """Poll until the index has what the space has, and says so."""
        wanted = replica.publisher._next_batch
        self.watch_until(
            lambda: (
                self.index.state("a") is IndexState.EXACT
                and self.index.view("a").lifetime == replica.publisher.lifetime
                and self.index.view("a").next_batch >= wanted
                and self.index.view("a").num_blocks == replica.num_blocks
            )
        )

    def kinds(self) -> list[type]:
        """Give the kinds of the messages so far."""
        return [type(message) for message in self.messages]


@contextmanager
def watching(replica: Replica, **options: Any) -> Iterator[Watcher]:  # noqa: ANN401 - of Watcher
    watcher = Watcher(replica, **options)
    with watcher.follower:
        yield watcher


def test_a_late_joiner_begins_with_a_snapshot_and_goes_on_with_events() -> None:
    with replica_of() as replica:
        replica.serve(0)
        with watching(replica) as watcher:
            watcher.catch_up(replica)
            assert watcher.kinds()[0] is Snapshot
            for first in (100, 200, 300, 400):
                replica.serve(first)
            watcher.catch_up(replica)
            assert Applied in watcher.kinds()
            expected = replica.space.match(tokens(41, first=400)).num_whole_tokens
            assert watcher.index.hits(watcher.index.hash(tokens(41, first=400))) == {"a": expected}
            assert watcher.follower.is_whole
            replica.space.reset_prefix_cache()
            replica.publisher.publish(replica.space.drain_events(), replica.space)
            watcher.watch_until(lambda: watcher.index.view("a").num_blocks == 0)


def test_heartbeats_tell_the_next_batch() -> None:
    with replica_of() as replica, watching(replica) as watcher:
        assert watcher.follower.silent_s is None
        watcher.watch_until(lambda: watcher.kinds().count(Alive) >= 3)
        alive = [message for message in watcher.messages if isinstance(message, Alive)]
        assert {message.lifetime for message in alive} == {replica.publisher.lifetime}
        numbers = [message.next_batch for message in alive]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert watcher.follower.silent_s is not None
        assert watcher.follower.silent_s < PATIENCE_S


def lose(watcher: Watcher) -> list[int]:
    """Lose each third message on the way, once; return their numbers."""
    following = watcher.follower._following
    published, lost = following.published, list[int]()

    def lossy(message: Message, now_s: float) -> None:
        if message.number % 3 == 0 and message.number not in lost:
            lost.append(message.number)
        else:
            published(message, now_s)

    vars(following)["published"] = lossy
    return lost


@pytest.mark.parametrize("buffer_batches", [1000, 1], ids=["sent-again", "snapshot"])
def test_lost_batches_are_asked_for_and_else_a_snapshot(*, buffer_batches: int) -> None:
    with replica_of(buffer_batches=buffer_batches) as replica, watching(replica) as watcher:
        watcher.catch_up(replica)
        lost = lose(watcher)
        for first in range(0, 2000, 100):
            replica.serve(first)
            watcher.watch_until(lambda: True)
        watcher.watch_until(lambda: len(lost) >= 10)
        watcher.catch_up(replica)
        assert (watcher.kinds().count(Snapshot) > 1) == (buffer_batches == 1)


def lose_first(watcher: Watcher) -> None:
    """Lose the first batch that comes, if any was sent so late that it does."""
    following = watcher.follower._following
    published = following.published
    vars(following)["published"] = lambda _message, _now_s: vars(following).update(published=published)


def test_without_requests_a_gap_degrades_and_stays() -> None:
    with replica_of(replay=None) as replica:
        for first in (0, 100):
            replica.serve(first)
        with watching(replica, replays=False) as watcher:
            lose_first(watcher)
            watcher.watch_until(lambda: watcher.index.state("a") is IndexState.DEGRADED)
            assert not watcher.follower.is_whole


def test_a_restarted_process_is_another_lifetime(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with ExitStack() as stack:
        with replica_of(endpoint, replay) as first:
            first.serve(0)
            watcher = stack.enter_context(watching(first))
            watcher.catch_up(first)
        second = stack.enter_context(replica_of(endpoint, replay))
        second.serve(500, num_tokens=20)
        assert second.publisher.lifetime != first.publisher.lifetime
        watcher.catch_up(second)
        assert watcher.index.hits(watcher.index.hash(tokens(41))) == {"a": 0}


def test_a_poll_takes_no_longer_than_it_may_and_a_publisher_may_come_later(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    rules = FollowingRules(patience_s=0.5, snapshot_patience_s=0.5, retry_s=0.05)
    with EventFollower(endpoint, replay, GROUPS, rules=rules) as follower:
        assert follower.poll(0.1) == []
        assert follower.poll(0.0) == []
        with replica_of(endpoint, replay) as replica:
            replica.serve(0)
            found: list[FollowedMessage] = []
            ends_at = time.monotonic() + PATIENCE_S
            while not any(isinstance(message, Snapshot) for message in found):
                assert time.monotonic() < ends_at
                found += follower.poll(0.05)


def test_a_poll_without_a_timeout_takes_what_is_there() -> None:
    with replica_of() as replica, watching(replica) as watcher:
        ends_at = time.monotonic() + PATIENCE_S
        while not any(isinstance(message, Applied) for message in watcher.follower.poll(0.0)):
            assert time.monotonic() < ends_at


def test_a_snapshot_that_cannot_be_taken_is_asked_for_again() -> None:
    with replica_of() as replica:
        calls: list[int] = []

        def take() -> Any:  # noqa: ANN401 - as below
            calls.append(1)
            if len(calls) < 3:
                raise EngineError("between two steps there was no time")
            return replica.publisher.snapshot(replica.space)

        replica.publisher.serve_snapshots(take)
        for first in (0, 100):
            replica.serve(first)
        last, ends_at = replica.publisher._next_batch - 1, time.monotonic() + PATIENCE_S
        while len(replica.publisher._sent._messages) <= last:  # a follower that hears the first batch needs no snapshot
            assert time.monotonic() < ends_at
        with watching(replica, rules=replace(RULES, most_replayed=0)) as watcher:
            watcher.catch_up(replica)
        assert len(calls) == 3


def test_a_publisher_without_snapshots_answers_as_vllm_does() -> None:
    """A request that it does not know is a number beyond all others."""
    with EventPublisher(LOCAL, LOCAL, groups=GROUPS, topic="kv") as publisher, zmq.Context() as context:
        assert publisher.replay_endpoint is not None
        with context.socket(zmq.DEALER) as client:
            client.connect(publisher.replay_endpoint)
            client.send_multipart([b"too", b"many", b"frames"])
            client.send_multipart([b"", b"snapshot"])
            client.send_multipart([b"", bytes(8)])
            assert client.poll(PATIENCE_MS)
            assert client.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
            assert client.poll(PATIENCE_MS)
            empty, topic, number, payload = client.recv_multipart()
            assert (empty, topic, number) == (b"", b"kv", bytes(8))
            assert msgspec.msgpack.decode(payload)[1:] == [[], 0, publisher.lifetime]


def test_idle_engines_events_are_published_before_a_heartbeat() -> None:
    with replica_of() as replica:
        cache(replica.space, tokens(40))

        def publish() -> None:
            replica.publisher.publish(replica.space.drain_events(), replica.space)

        replica.publisher.serve_snapshots(lambda: replica.publisher.snapshot(replica.space), before_beat=publish)
        with watching(replica) as watcher:
            watcher.watch_until(lambda: watcher.index.view("a").num_blocks == replica.num_blocks)


def test_batches_beyond_the_queue_are_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.events.publisher.MOST_QUEUED", 0)
    with replica_of() as replica, watching(replica) as watcher:
        watcher.watch_until(lambda: watcher.kinds().count(Snapshot) == 1)
        replica.serve(0)
        assert replica.publisher.num_dropped == 1
        watcher.catch_up(replica)
        assert watcher.kinds().count(Snapshot) == 2


def test_another_engine_is_followed_by_its_tokens_and_another_model_is_named() -> None:
    """VLLM's form, without a lifetime; then blocks of another size, which would never hit."""
    index = ReplicaIndex(GROUPS[:1])
    index.add_replica("a")

    def batch(number: int, size: int) -> list[bytes]:
        fields = {"block_hashes": [number], "parent_block_hash": None, "token_ids": list(range(size))}
        event = {"type": "BlockStored", **fields, "block_size": size, "lora_id": None, "medium": "GPU"}
        return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.0 + number, [event], 0])]

    size = 4
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        with EventFollower(endpoint, None, GROUPS[:1]) as follower:
            publisher.recv()
            publisher.send_multipart(batch(0, size))
            for message in follower.poll(PATIENCE_S):
                follow(index, "a", message, 0.0)
            assert index.hits(index.hash(np.arange(size + 1)))["a"] == size
            assert (index.state("a"), follower.is_whole) == (IndexState.DEGRADED, False)
            publisher.send_multipart(batch(0, 2 * size))
        with EventFollower(endpoint, None, GROUPS[:1]) as follower:
            publisher.recv()
            publisher.recv()
            publisher.send_multipart(batch(0, 2 * size))
            told = rf"blocks of group 0 as FullAttention\(block_size={2 * size}.*and the index has FullAttention"
            with pytest.raises(RecordingError, match=told):
                follower.poll(PATIENCE_S)
        with EventFollower(endpoint, None, None) as learning:
            assert not learning.groups_seen
            publisher.recv()
            publisher.recv()
            publisher.send_multipart(batch(0, 2 * size))
            assert learning.poll(PATIENCE_S)
            assert learning.groups_seen == (FullAttention(2 * size),)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"endpoint": "here"}, "'here' is not an endpoint"),
        ({"endpoint": "tcp://192.0.2.1:1"}, "cannot be used"),
        ({"heartbeat_s": 0}, "heartbeat_s must be at least 0.01 seconds, got 0"),
        ({"buffer_batches": 0}, "buffer_batches"),
        ({"rank": -1}, "rank"),
    ],
)
def test_odd_arguments_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        EventPublisher(**{"endpoint": LOCAL, "groups": GROUPS, **arguments})


def test_a_closed_publisher_says_so() -> None:
    with replica_of() as replica:
        pass
    replica.publisher.close()
    with pytest.raises(ConfigurationError, match="closed"):
        replica.serve(0)
    replica.publisher.publish((), replica.space)


def test_many_restarts_and_losses_over_sockets(tmp_path: Path) -> None:
    """The fault test of tests/wire, in small, over real sockets."""
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    random = np.random.default_rng(3)
    with ExitStack() as stack:
        watchers: list[Watcher] = []
        losses: list[list[int]] = []
        for _ in range(3):
            with replica_of(endpoint, replay, buffer_batches=20) as replica:
                watchers.append(stack.enter_context(watching(replica)))
                losses.append(lose(watchers[-1]))
                for _ in range(30):
                    replica.serve(100 * int(random.integers(8)), int(random.integers(5, 60)))
                    for watcher in watchers:
                        watcher.watch_until(lambda: True)
                for watcher in watchers:
                    watcher.catch_up(replica)
        assert min(map(len, losses)) > 3
