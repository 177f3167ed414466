"""EventPublisher: publishes the changes of an engine's cache, in a thread of its own.

::

    engine's thread                          publisher's thread                     sockets
    publish: copy the stored blocks, ------> encode, send, keep the latest  ------> PUB      topic, number, payload
      number the batch, queue it             answer requests                <-----> ROUTER   batches again, snapshots
    take a snapshot between two steps <----- request one
                                             send a heartbeat if no batch was sent

The engine's thread never waits for the publisher's thread. If that falls behind by 100,000 batches, further ones are
dropped; their numbers are missing, so that every consumer detects the gap and requests a snapshot.

A heartbeat is a numbered batch without events, so that consumers that do not distinguish heartbeats can read it too. A
lost last batch is therefore detected within ``heartbeat_s``.
"""

import logging
import math
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import tee
from typing import Final, Self, final

from pagedkv.contract.answers import CacheEvents, TierEvents
from pagedkv.contract.arguments import as_count, as_number
from pagedkv.contract.extras import needing
from pagedkv.contract.spec import GroupSpec
from pagedkv.errors import ConfigurationError, PagedKVError
from pagedkv.events.follower import bind
from pagedkv.wire import (
    BatchEncoder,
    CachedSpace,
    CacheSnapshot,
    Changes,
    Message,
    Request,
    SentBatches,
    answer,
    broadcast,
    changes_of,
    end_of_answer,
    listed_pools,
    requested,
)

with needing("record", "a stream of KV events"):
    import zmq

LOG: Final = logging.getLogger("pagedkv.events")

MOST_UNSENT: Final = 100_000
"""Most messages that wait for a slow subscriber, as in vLLM; it loses further ones."""
MOST_QUEUED: Final = 100_000
LEAST_HEARTBEAT_S: Final = 0.01
MOST_BUFFERED: Final = 10**7
CLOSING_S: Final = 1.0
MAX_RANK: Final = 10_000


@final
class EventPublisher:
    """Publishes KV events in the form of vLLM 0.33, with lifetimes, heartbeats and snapshots.

    Use it as a context manager, or call :meth:`close`.

    Args:
        endpoint: address to bind to: tcp://HOST:PORT or ipc://PATH; ``tcp://*:5557`` for all addresses of the machine,
            ``tcp://127.0.0.1:*`` for any free port.
        replay_endpoint: address for requests of earlier batches and of snapshots; None: requests are not served.
        groups: the model's KV-cache groups.
        topic: the first frame of all messages.
        rank: rank of the data-parallel engine, a field of all batches. Each rank has its own endpoints.
        heartbeat_s: seconds without a batch after which a heartbeat is sent.
        buffer_batches: number of latest batches, heartbeats included, that are kept for requests.

    Attributes:
        lifetime: a unique name of this publisher.
        endpoint, replay_endpoint: the addresses, with the ports that the system chose.
        num_dropped: batches that were dropped because the publisher's thread fell behind.

    Raises:
        ConfigurationError: an endpoint cannot be bound, or a number is out of range.
    """

    def __init__(  # noqa: PLR0913 - an address, and the options that other engines' publishers have
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        groups: Sequence[GroupSpec],
        topic: str = "",
        rank: int = 0,
        heartbeat_s: float = 1.0,
        buffer_batches: int = 10_000,
    ) -> None:
        as_count(rank, "rank", most=MAX_RANK)
        as_count(buffer_batches, "buffer_batches", least=1, most=MOST_BUFFERED)
        if as_number(heartbeat_s, "heartbeat_s") < LEAST_HEARTBEAT_S:
            raise ConfigurationError(f"heartbeat_s must be at least {LEAST_HEARTBEAT_S} seconds, got {heartbeat_s}")
        self.lifetime = uuid.uuid4().hex
        self.num_dropped = 0
        self._topic = topic.encode()
        self._heartbeat_s = heartbeat_s
        self._encoder = BatchEncoder(groups, self.lifetime, rank)
        self._sent = SentBatches(buffer_batches)
        self._take_snapshot: Callable[[], CacheSnapshot] | None = None
        self._before_beat: Callable[[], None] = _do_nothing
        self._lock = threading.Lock()  # guards the next four attributes
        self._next_batch = 0
        self._queue: deque[tuple[int, float, Changes]] = deque()
        self._is_woken = False
        self._is_closed = False
        with ExitStack() as on_failure:
            self._context = on_failure.enter_context(zmq.Context())
            self._published = self._context.socket(zmq.PUB)
            self._published.set_hwm(MOST_UNSENT)
            self._requests = self._context.socket(zmq.ROUTER)
            self._requests.sndhwm = 2 * (buffer_batches + 1)  # as in vLLM: one whole answer waits for a slow client
            on_failure.callback(self._close_sockets)
            self.endpoint = bind(self._published, endpoint)
            self.replay_endpoint = None if replay_endpoint is None else bind(self._requests, replay_endpoint)
            on_failure.pop_all()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)  # noqa: FBT003 - as the library has it
        self._thread = threading.Thread(target=self._run, name="pagedkv events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called by the engine's thread

    def publish(self, events: Sequence[CacheEvents], space: CachedSpace, tiers: Sequence[TierEvents] = ()) -> None:
        """Queue a batch of events, if there are any. Never waits.

        Args:
            events: events of each pool, from :meth:`BlockSpace.drain_events <pagedkv.BlockSpace.drain_events>`.
            space: the block space of the events, unchanged since: the contents of the stored blocks are copied from it.
            tiers: events of each medium below device memory.

        Raises:
            ConfigurationError: the publisher is closed.

        Cost: O(events x block size); some 170 us for 1 to 64 blocks (docs/routing.md).
        """
        if not any(map(len, events)) and not any(map(len, tiers)):
            return
        changes = changes_of(space, events, tiers)
        with self._lock:
            self._require_open()
            number, self._next_batch = self._next_batch, self._next_batch + 1
            if len(self._queue) >= MOST_QUEUED:
                self.num_dropped += 1
                return
            self._queue.append((number, time.time(), changes))
            if not self._is_woken:
                self._is_woken = True
                self._waking.send(b"\0")

    def snapshot(self, space: CachedSpace, tiers: Sequence[TierEvents] = ()) -> CacheSnapshot:
        """Publish the undrained events of the space, and copy all its blocks, between two steps.

        Args:
            space: the block space.
            tiers: all entries of each medium below device memory, whose earlier events are published.

        Raises:
            ConfigurationError: the publisher is closed.

        Cost: O(blocks x block size).
        """
        self.publish(space.drain_events(), space)
        pools = listed_pools(space)
        with self._lock:
            return CacheSnapshot(self._next_batch, pools, tuple(tiers))

    # Called by any thread

    def serve_snapshots(
        self, take: Callable[[], CacheSnapshot], *, before_beat: Callable[[], None] | None = None
    ) -> None:
        """Answer requests for snapshots from now on; before, the answer is empty, as vLLM's.

        Args:
            take: called by the publisher's thread. It makes the engine's thread call :meth:`snapshot` between two
                steps, and returns the result. The publisher sends no message meanwhile. If it raises an error, the
                error is logged, and the answer is empty.
            before_beat: called by the publisher's thread before each heartbeat. It may schedule the publishing of
                events that arose without a step. It must not wait.
        """
        self._take_snapshot = take
        self._before_beat = before_beat or _do_nothing

    def close(self) -> None:
        """Send the queued batches, for at most a second, and close the sockets. May be called again."""
        with self._lock:
            is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        self._take_snapshot = None
        self._waking.send(b"\0")
        self._thread.join()
        self._waking.close()
        self._woken.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError("the publisher of KV events is closed")

    def _close_sockets(self) -> None:
        for each in (self._published, self._requests):
            each.close(linger=round(1000 * CLOSING_S))
        self._context.term()

    # The publisher's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._requests, zmq.POLLIN)
        answers: deque[Iterator[list[bytes]]] = deque()
        beat_at = time.monotonic()
        try:
            while True:
                wait_s = 0.0 if answers else max(0.0, beat_at - time.monotonic())
                ready = dict(poller.poll(math.ceil(1000 * wait_s)))
                if self._woken.fileno() in ready:
                    self._woken.recv(1024)
                is_closing = self._is_closed
                if self._send_queued():
                    beat_at = time.monotonic() + self._heartbeat_s
                if is_closing:
                    return
                if time.monotonic() >= beat_at:
                    self._before_beat()
                    self._beat()
                    beat_at = time.monotonic() + self._heartbeat_s
                if self._requests in ready:
                    answers += self._answers(self._waiting_requests())
                if answers:
                    self._send_part(answers)
        except Exception:
            LOG.exception("the publishing of KV events has failed and is over")
            raise
        finally:
            self._close_sockets()

    def _send_queued(self) -> bool:
        """Send all queued batches; return whether there were any."""
        has_sent = False
        while True:
            with self._lock:
                if not self._queue:
                    self._is_woken = False
                    return has_sent
                number, sent_s, changes = self._queue.popleft()
            self._send(number, self._encoder.batch(sent_s, changes))
            has_sent = True

    def _beat(self) -> None:
        with self._lock:
            if self._queue:
                return
            number, self._next_batch = self._next_batch, self._next_batch + 1
        self._send(number, self._encoder.batch(time.time(), ()))

    def _send(self, number: int, payload: bytes) -> None:
        message = Message(number, payload, self._topic)
        self._published.send_multipart(broadcast(message))
        self._sent.append(message)

    def _waiting_requests(self) -> list[Request]:
        requests = []
        while self._requests.poll(0):
            request = requested(self._requests.recv_multipart())
            requests += [] if request is None else [request]
        return requests

    def _answers(self, requests: Sequence[Request]) -> Iterator[Iterator[list[bytes]]]:
        """Yield the answer to each request, part by part. One snapshot serves all requests for one."""
        num_snapshots = sum(request.first is None for request in requests)
        snapshots = iter(tee(self._snapshot_parts(), num_snapshots) if num_snapshots else ())
        for request in requests:
            found = next(snapshots) if request.first is None else self._sent.since(request.first)
            yield _answer_of(request.client, found)

    def _snapshot_parts(self) -> Iterable[Message]:
        if self._take_snapshot is None:
            return ()
        try:
            snapshot = self._take_snapshot()
        except (PagedKVError, OSError, RuntimeError) as problem:
            LOG.warning("a snapshot of the cache could not be taken: %s", problem)
            return ()
        payloads = self._encoder.snapshot(time.time(), snapshot.pools, snapshot.tiers)
        return (Message(snapshot.next_batch, payload, self._topic) for payload in payloads)

    def _send_part(self, answers: deque[Iterator[list[bytes]]]) -> None:
        frames = next(answers[0], None)
        if frames is None:
            answers.popleft()
        else:
            self._requests.send_multipart(frames)


def _answer_of(client: bytes, messages: Iterable[Message]) -> Iterator[list[bytes]]:
    for message in messages:
        yield answer(client, message)
    yield end_of_answer(client)


def _do_nothing() -> None:
    """Do nothing."""
