"""A publisher and its followers without sockets: messages are lost and late as a test says."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from pagedkv import BlockSpace, GroupSpec
from pagedkv.routing import ReplicaIndex
from pagedkv.wire import (
    BatchEncoder,
    Following,
    FollowingRules,
    Message,
    OutgoingRequest,
    SentBatches,
    changes_of,
    follow,
    listed_pools,
)

__all__ = ["MemoryFollower", "MemoryPublisher", "Network"]


@dataclass
class Network:
    """Delivers messages later, in the order in which they were sent, some of them never.

    Args:
        loss: fraction that is lost; delay_s: of the others.
        seed: of the losses.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    seed: int = 0
    now_s: float = 0.0
    num_lost: int = 0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random, self._order = Random(self.seed), count()

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver later, or never."""
        if self._random.random() < self.loss:
            self.num_lost += 1
        else:
            heapq.heappush(self._queue, (self.now_s + self.delay_s, next(self._order), deliver))

    def advance(self, now_s: float) -> None:
        """Deliver what is due."""
        while self._queue and self._queue[0][0] <= now_s:
            self.now_s, _, deliver = heapq.heappop(self._queue)
            deliver()
        self.now_s = now_s


class MemoryPublisher:
    """Does what :class:`~pagedkv.events.EventPublisher` does, at once.

    Args:
        space: the cache; lifetime: of its process.
        network: where its messages go.
        buffer_batches: batches that it can send again.
    """

    def __init__(self, space: BlockSpace, lifetime: str, network: Network, buffer_batches: int = 10_000) -> None:
        self.space, self.lifetime, self.network = space, lifetime, network
        self.next_batch = 0
        self.followers: list[MemoryFollower] = []
        self._encoder = BatchEncoder(space.config.groups, lifetime)
        self._sent = SentBatches(buffer_batches)

    def publish(self, *, is_beat: bool = False) -> int:
        """Publish what waits, or a heartbeat; return how many events there were."""
        events = self.space.drain_events()
        num_events = sum(map(len, events))
        if num_events or is_beat:
            payload = self._encoder.batch(self.network.now_s, changes_of(self.space, events))
            message = Message(self.next_batch, payload)
            self.next_batch += 1
            self._sent.append(message)
            for each in self.followers:
                each.send(self, message)
        return num_events

    def answer(self, follower: "MemoryFollower", wanted: OutgoingRequest) -> None:
        """Answer a request."""
        if wanted.first is not None:
            found = self._sent.since(wanted.first)
        else:
            self.publish()
            payloads = self._encoder.snapshot(self.network.now_s, listed_pools(self.space))
            found = [Message(self.next_batch, payload) for payload in payloads]
        for message in (*found, None):
            follower.send_answer(self, wanted, message)


class MemoryFollower:
    """Follows publishers one after the other, and keeps an index of theirs.

    Args:
        groups: of the model.
        rules: of :class:`Following`.
    """

    def __init__(self, groups: Sequence[GroupSpec], rules: FollowingRules | None = None) -> None:
        self.index = ReplicaIndex(groups)
        self.index.add_replica("a")
        self.following = Following(groups, rules=rules or FollowingRules())
        self.publisher: MemoryPublisher | None = None
        self.num_requests = {"batches": 0, "snapshot": 0}

    def subscribe(self, publisher: MemoryPublisher) -> None:
        """Follow a publisher from now on; nothing comes from an earlier one any more."""
        self.publisher = publisher
        publisher.followers.append(self)

    def send(self, publisher: MemoryPublisher, message: Message) -> None:
        """Send a message to this follower."""
        publisher.network.send(lambda: self._receive(publisher, lambda now: self.following.published(message, now)))

    def send_answer(self, publisher: MemoryPublisher, wanted: OutgoingRequest, message: Message | None) -> None:
        """Send a part of an answer to this follower."""
        take = lambda now: self.following.answered(wanted.number, message, now)  # noqa: E731
        publisher.network.send(lambda: self._receive(publisher, take))

    def advance(self) -> None:
        """Let the follower go on by its clock."""
        assert self.publisher is not None
        self._receive(self.publisher, self.following.advance)

    def _receive(self, publisher: MemoryPublisher, take: Callable[[float], None]) -> None:
        if publisher is not self.publisher:
            return  # the connection is to another process by now
        now_s = publisher.network.now_s
        take(now_s)
        for message in self.following.take_messages():
            follow(self.index, "a", message, now_s)
        wanted = self.following.take_request()
        if wanted is not None:
            self.num_requests["snapshot" if wanted.first is None else "batches"] += 1
            publisher.network.send(lambda: publisher.answer(self, wanted))
