"""A real publisher and whoever follows it: when the work begins, and until when there is something to receive."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pagedkv.events import Endpoints, Subscription
from pagedkv.planner.recording.recorder import Bounds, Ending, Recorder
from pagedkv.wire import Message
from tests.peers.counting import Residents
from tests.recording.publisher import doing

__all__ = ["FollowedPublisher", "LossySubscription", "PublishedCache", "followed", "recorded", "there"]

PATIENCE_MS: Final = 60_000
BEAT_S: Final = 0.01


class FollowedPublisher:
    """A peer's ``ZmqEventPublisher``.

    Args:
        publisher: the peer's.
        empty_batch: makes a batch without events.
    """

    def __init__(self, publisher: Any, empty_batch: Callable[[], Any]) -> None:  # noqa: ANN401 - the peer's class
        self.publisher = publisher
        self._empty_batch = empty_batch
        self.num_published = 0
        self._monitor = publisher._pub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def publish(self, batch: object) -> None:
        """Publish a batch of the peer's class."""
        self.publisher.publish(batch)
        self.num_published += 1

    def await_subscriber(self) -> None:
        """Wait until somebody is connected."""
        assert self._monitor.poll(PATIENCE_MS), "nobody subscribed"
        recv_monitor_message(self._monitor)

    def beat_until(self, is_enough: Callable[[], bool]) -> None:
        """Publish batches without events, so that whoever missed the last one notices."""
        pause = threading.Event()
        while not is_enough():
            self.publish(self._empty_batch())
            pause.wait(BEAT_S)

    def payloads(self) -> list[bytes]:
        """Give what was published, as the publisher keeps it."""
        return [payload for _, payload in list(self.publisher._buffer)]

    def close(self) -> None:
        """End, as the engine ends it."""
        self.publisher._pub.disable_monitor()
        self._monitor.close(linger=0)
        self.publisher.shutdown()


class PublishedCache:
    """A peer's cache, which requests are served from one after the other, and the publisher of its events.

    Args:
        folder: of its sockets, where no endpoint is told.
        publisher: the peer's class of publishers; batch: its class of messages.
        rank: of the data-parallel engine.
        options: of the publisher.
    """

    def __init__(self, folder: Path, publisher: Any, batch: Any, rank: int, options: dict[str, object]) -> None:  # noqa: ANN401 - the peer's classes
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        given = {"endpoint": self.endpoint, "replay_endpoint": self.replay} | options
        self.wire = FollowedPublisher(publisher(rank, **given), lambda: batch(ts=time.time(), events=[]))
        self.num_batches = 0
        self.hits: list[int] = []
        self._batch = batch

    def publish(self, events: list[Any]) -> None:
        """Publish the events of a step, if there are any, as the peer's scheduler does."""
        if events:
            self.wire.publish(self._batch(ts=time.time(), events=events))
            self.num_batches += 1

    def batches(self) -> list[Any]:
        """Give what was published, decoded by the peer's own classes."""
        decoder = msgspec.msgpack.Decoder(self._batch)
        return [decoder.decode(payload) for payload in self.wire.payloads()]


class LossySubscription(Subscription):
    """Loses messages on the way: five in a row of every ten."""

    def receive(self, timeout_s: float) -> Message | None:
        """Receive a message, if it is not lost."""
        message = super().receive(timeout_s)
        return None if message is not None and message.number % 10 >= 5 else message


@contextmanager
def followed(publisher: FollowedPublisher, work: Callable[[], None]) -> Iterator[Callable[[int], bool]]:
    """Do an engine's work once somebody subscribed, and publish empty batches until the body is left.

    Yields:
        tells of a number of messages whether it is all that the work published, or more.
    """
    is_left, is_done = threading.Event(), threading.Event()
    num_of_work: list[int] = []

    def run() -> None:
        num_of_work.append(0)
        try:
            publisher.await_subscriber()
            work()
            num_of_work[0] = publisher.num_published
        finally:
            is_done.set()  # what failed is told by whoever waits
        publisher.beat_until(is_left.is_set)

    with doing(run):
        try:
            yield lambda num_messages: is_done.is_set() and num_messages >= num_of_work[0]
        finally:
            is_left.set()


def recorded(
    publisher: FollowedPublisher,
    endpoints: Endpoints,
    work: Callable[[], None],
    subscribe: Callable[[Endpoints], Subscription] = Subscription,
) -> Recorder:
    """Record all that an engine's work publishes."""
    with followed(publisher, work) as is_all, subscribe(endpoints) as subscription:
        recorder = Recorder(subscription, time.time)
        ending = recorder.run(Bounds(duration_s=PATIENCE_MS / 1000), is_over=lambda: is_all(recorder.num_messages))
    assert ending is Ending.ASKED
    return recorder


def there(recorder: Recorder) -> Residents:
    """Give what a recording says is there, in the form of the count."""
    found: Residents = {}
    for medium, group, block_hash in recorder.residency._since_s:
        found.setdefault(medium, set()).add((group, block_hash))
    told = {medium: record.num_blocks for medium, record in recorder.residency.media.items() if record.num_blocks}
    assert told == {medium: len(blocks) for medium, blocks in found.items()}
    return found
