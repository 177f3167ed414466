"""EventFollower: follows the KV events of one publisher over sockets, by :class:`~pagedkv.wire.Following`."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self, final

from pagedkv.contract.extras import needing
from pagedkv.contract.spec import GroupSpec
from pagedkv.events.subscription import MOST_WAITING, Endpoints, connect
from pagedkv.wire import (
    SNAPSHOT_REQUEST,
    FollowedMessage,
    Following,
    FollowingRules,
    OutgoingRequest,
    answered,
    published,
    request_frames,
)

with needing("record", "a stream of KV events"):
    import zmq

__all__ = ["EventFollower"]

MOST_AT_ONCE: Final = 1000
"""Most messages that one poll reads from a socket."""


@final
class EventFollower:
    """Follows one publisher. One thread at a time may use it.

    Broken connections are made again. Batches that were lost meanwhile are requested again, or replaced by a snapshot.

    Args:
        endpoint: address of the publisher's messages.
        replay_endpoint: address for requests; None: lost batches are not requested.
        groups: the model's KV-cache groups.
        topic: required beginning of topics.
        rules: timeouts and limits.
        clock: returns monotonic seconds.

    Raises:
        ConfigurationError: an endpoint is invalid.
    """

    def __init__(  # noqa: PLR0913 - two addresses, and the expected messages
        self,
        endpoint: str,
        replay_endpoint: str | None,
        groups: Sequence[GroupSpec],
        *,
        topic: str = "",
        rules: FollowingRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = Endpoints(endpoint, replay_endpoint, topic)
        self._clock = clock
        can_request = replay_endpoint is not None
        self._following = Following(groups, can_request=can_request, rules=rules or FollowingRules(), source=endpoint)
        self._requested = 0
        self._requests: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        with ExitStack() as on_failure:
            self._context = zmq.Context()
            on_failure.callback(self.close)
            self._published: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
            self._published.set_hwm(MOST_WAITING)
            self._published.subscribe(topic)
            connect(self._published, endpoint)
            on_failure.pop_all()
        self._poller.register(self._published, zmq.POLLIN)
        self._heard_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_whole(self) -> bool:
        """Whether the messages up to the last batch are complete, from the first batch or a snapshot on."""
        return self._following.is_whole

    @property
    def silent_s(self) -> float | None:
        """Seconds since the publisher's last message; None before the first one.

        A publisher sends a heartbeat every second by default.
        """
        return None if self._heard_s is None else self._clock() - self._heard_s

    def poll(self, timeout_s: float) -> list[FollowedMessage]:
        """Wait for messages until the timeout; return those that arrived, in order, perhaps none.

        Raises:
            RecordingError: a message is not one of pagedkv's KV events, or of another model.
        """
        ends_at = self._clock() + max(0.0, timeout_s)
        messages = self._advance()
        while not messages:
            left_s = ends_at - self._clock()
            self._receive(max(0.0, left_s))
            messages = self._advance()
            if left_s <= 0:
                break
        return messages

    def close(self) -> None:
        """Close the sockets. May be called again."""
        self._context.destroy(linger=0)

    def _advance(self) -> list[FollowedMessage]:
        """Request missing batches or a snapshot if due; return the messages that are ready."""
        self._following.advance(self._clock())
        self._request()
        return self._following.take_messages()

    def _request(self) -> None:
        wanted = self._following.take_request()
        endpoint = self._endpoints.replay
        if wanted is None or endpoint is None:
            return
        self._drop_requests()
        self._requests = self._context.socket(zmq.DEALER)  # a new socket, which receives no earlier answer
        self._requests.set_hwm(0)
        self._requests.linger = 0
        connect(self._requests, endpoint)
        self._poller.register(self._requests, zmq.POLLIN)
        self._requests.send_multipart(_frames_of(wanted))
        self._requested = wanted.number

    def _drop_requests(self) -> None:
        if self._requests is not None:
            self._poller.unregister(self._requests)
            self._requests.close(linger=0)
            self._requests = None

    def _receive(self, timeout_s: float) -> None:
        ready = dict(self._poller.poll(math.ceil(1000 * timeout_s)))
        now_s = self._clock()
        if ready:
            self._heard_s = now_s
        if self._published in ready:
            for _ in range(MOST_AT_ONCE):
                frames = _next(self._published)
                if frames is None:
                    break
                self._following.published(published(frames, self._endpoints.events), now_s)
        requests = self._requests
        if requests is not None and requests in ready:
            for _ in range(MOST_AT_ONCE):
                frames = _next(requests)
                if frames is None:
                    break
                self._take_answer(frames, now_s)

    def _take_answer(self, frames: list[bytes], now_s: float) -> None:
        assert self._endpoints.replay is not None
        self._following.answered(self._requested, answered(frames, self._endpoints.replay), now_s)


def _next(source: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _frames_of(wanted: OutgoingRequest) -> list[bytes]:
    return SNAPSHOT_REQUEST if wanted.first is None else request_frames(wanted.first)
