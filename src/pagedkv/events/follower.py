"""EventFollower: follows the KV events of one publisher over sockets, by a Subscription, which receives its messages.

Missed messages are requested at a second socket, if the publisher has one. The request is a number; the answer has the
messages from that number on, as far as the publisher has kept them, then an end. ZeroMQ reconnects by itself. A
reconnection is reported, since a restarted process counts from 0 and sends no other sign of the restart.

Batches say by themselves which rules apply: those of pagedkv name a lifetime, and can become EXACT by a snapshot;
those of vLLM and SGLang name none, and their blocks are learnt from tokens and parents (:mod:`pagedkv.wire.unnamed`).
An engine that is exchanged for one of the other kind is followed by the other rules from then on.

A Subscription does not decode payloads.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Self, final

from pagedkv.contract.extras import needing
from pagedkv.contract.spec import GroupSpec, keeps_state
from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.wire import (
    ENDPOINT_ADVICE,
    SNAPSHOT_REQUEST,
    FollowedMessage,
    Following,
    FollowingRules,
    LearntNames,
    Message,
    OutgoingRequest,
    UnnamedFollowing,
    answered,
    decode_batch,
    names_lifetime,
    published,
    request_frames,
)

with needing("record", "a stream of KV events"):
    import zmq
MOST_AT_ONCE: Final = 1000
"""Most messages that one poll reads from a socket."""


@final
class EventFollower:
    """Follows one publisher. One thread at a time may use it.

    Broken connections are made again. Batches that were lost meanwhile are requested again, or replaced by a snapshot.

    Args:
        endpoint: address of the publisher's messages.
        replay_endpoint: address for requests; None: lost batches are not requested.
        groups: the model's KV-cache groups; None: those that the engine's events show (``groups_seen``).
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
        groups: Sequence[GroupSpec] | None,
        *,
        topic: str = "",
        rules: FollowingRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = Endpoints(endpoint, replay_endpoint, topic)
        self._clock = clock
        self._groups = None if groups is None else tuple(groups)
        self._rules = rules or FollowingRules()
        self._learnt_groups: tuple[GroupSpec, ...] = ()
        self._following: Following | UnnamedFollowing = self._unnamed() if groups is None else self._named(groups)
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

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_whole(self) -> bool:
        """Whether the messages up to the last batch are complete, from the first batch or a snapshot on."""
        return isinstance(self._following, Following) and self._following.is_whole

    @property
    def unnamed(self) -> UnnamedFollowing | None:
        """The state of following an engine that names no lifetime; None for pagedkv's own batches."""
        return self._following if isinstance(self._following, UnnamedFollowing) else None

    @property
    def groups_seen(self) -> tuple[GroupSpec, ...]:
        """The model's groups: as given, or as the events so far show; () before the first stored block."""
        if self._groups is not None:
            return self._groups
        return self._following.names.groups if isinstance(self._following, UnnamedFollowing) else self._learnt_groups

    @property
    def silent_s(self) -> float | None:
        """Seconds since the publisher's last message; None before the first one.

        A publisher sends a heartbeat every second by default.
        """
        return None if self._heard_s is None else self._clock() - self._heard_s

    def poll(self, timeout_s: float) -> list[FollowedMessage]:
        """Wait for messages until the timeout; return those that arrived, in order, perhaps none.

        Raises:
            RecordingError: a message is no batch of KV events, or of other groups than the given ones. The next call
                goes on behind it.
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
        self._require_groups()
        return self._following.take_messages()

    def _require_groups(self) -> None:
        """Refuse an engine whose blocks are not those of the given groups, which would never hit."""
        if self._groups is None or not isinstance(self._following, UnnamedFollowing):
            return
        seen = self._following.names.groups_seen
        for number, group in seen.items():
            given = self._groups[number] if number < len(self._groups) else None
            if given is None or _shape(given) != _shape(group):
                known = "none" if given is None else str(given)
                reason = f"its events store blocks of group {number} as {group}, and the index has {known}"
                raise RecordingError(
                    self._endpoints.events, reason, "Give the groups of the engine that publishes there"
                )

    def _named(self, groups: Sequence[GroupSpec]) -> Following:
        self._learnt_groups = tuple(groups)
        can_request = self._endpoints.replay is not None
        return Following(groups, can_request=can_request, rules=self._rules, source=self._endpoints.events)

    def _unnamed(self) -> UnnamedFollowing:
        can_request = self._endpoints.replay is not None
        return UnnamedFollowing(can_request=can_request, rules=self._rules, source=self._endpoints.events)

    def _suits(self, message: Message) -> bool:
        """Choose the rules by what a batch names; return whether they can take it."""
        is_named = names_lifetime(message.payload)
        if is_named == isinstance(self._following, Following):
            return True
        if not is_named:
            self._following = self._unnamed()
            return True
        groups = self._groups
        if groups is None:
            names = LearntNames()
            names.events(decode_batch(message.payload, self._endpoints.events))
            groups = names.groups
        if groups:  # else the batch stores nothing, and a later one shows the groups
            self._following = self._named(groups)
        return bool(groups)

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
                message = published(frames, self._endpoints.events)
                if self._suits(message):
                    self._following.published(message, now_s)
        requests = self._requests
        if requests is not None and requests in ready:
            for _ in range(MOST_AT_ONCE):
                frames = _next(requests)
                if frames is None:
                    break
                self._take_answer(frames, now_s)

    def _take_answer(self, frames: list[bytes], now_s: float) -> None:
        assert self._endpoints.replay is not None
        following, message = self._following, answered(frames, self._endpoints.replay)
        if message is None or (self._suits(message) and self._following is following):
            self._following.answered(self._requested, message, now_s)


def _next(source: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _shape(group: GroupSpec) -> tuple[str, int]:
    return group.kind, 0 if keeps_state(group) else group.block_size


def _frames_of(wanted: OutgoingRequest) -> list[bytes]:
    return SNAPSHOT_REQUEST if wanted.first is None else request_frames(wanted.first)


with needing("record", "a stream of KV events"):
    import zmq
    from zmq.utils.monitor import recv_monitor_message


with needing("record", "a stream of KV events"):
    import zmq
MOST_WAITING: Final = 100_000
"""Most messages that wait to be read, the usual default of publishers; further messages are a gap."""
REPLAY_PATIENCE_MS: Final = 5000
"""Milliseconds to wait for the next part of an answer. Long, since a publisher answers only between two of its own
messages."""


def require_endpoint(endpoint: str) -> None:
    """Raise ConfigurationError if a text is not an endpoint."""
    scheme, found, rest = endpoint.partition("://")
    if not found or scheme not in {"tcp", "ipc"} or not rest:
        raise ConfigurationError(f"{endpoint!r} is not an endpoint. {ENDPOINT_ADVICE}")


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind a socket; return its address, with the port that the system chose. Raises ConfigurationError."""
    require_endpoint(endpoint)
    socket.ipv6 = is_ipv6(endpoint)
    with refusals(endpoint):
        socket.bind(endpoint)
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect a socket. Raises ConfigurationError."""
    socket.ipv6 = is_ipv6(endpoint)
    with refusals(endpoint):
        socket.connect(endpoint)


def is_ipv6(endpoint: str) -> bool:
    """Return whether an address is IPv6.

    Sockets are opened for one version: for a name, a socket that allows both would try only the first address.
    """
    return "[" in endpoint


@contextmanager
def refusals(endpoint: str) -> Iterator[None]:
    """Turn the system's error about an endpoint into a ConfigurationError."""
    try:
        yield
    except zmq.ZMQError as error:
        raise ConfigurationError(f"{endpoint} cannot be used: {error.strerror}. {ENDPOINT_ADVICE}") from error


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a publisher.

    Args:
        events: address of its messages: tcp://HOST:PORT or ipc://PATH.
        replay: address for requesting messages again, if it has one.
        topic: required beginning of topics.
        bind: whether to bind this endpoint, since the publisher connects to it: its own endpoint names a machine.

    Raises:
        ConfigurationError: an endpoint is invalid.
    """

    events: str
    replay: str | None = None
    topic: str = ""
    bind: bool = False

    def __post_init__(self) -> None:
        """Refuse endpoints to which no socket can connect."""
        for endpoint in (self.events, *([] if self.replay is None else [self.replay])):
            require_endpoint(endpoint)
            if "*" in endpoint and (not self.bind or endpoint == self.replay):
                raise ConfigurationError(f"{endpoint} means all addresses of a machine. {ENDPOINT_ADVICE}")


class Subscription:
    """Follows one publisher; use it as a context manager.

    Args:
        endpoints: addresses of the publisher.

    Raises:
        ConfigurationError: the system refuses an endpoint.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._is_connected = False
        self._num_breaks = 0
        self._silence: str | None = None
        with ExitStack() as on_failure:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.SUB)
            self._socket.set_hwm(MOST_WAITING)
            self._socket.ipv6 = is_ipv6(endpoints.events)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            on_failure.callback(self._close)
            self._socket.subscribe(endpoints.topic)
            with refusals(endpoints.events):
                (self._socket.bind if endpoints.bind else self._socket.connect)(endpoints.events)
            on_failure.pop_all()
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    @property
    def source(self) -> str:
        """The endpoint, for error messages."""
        return self._endpoints.events

    @property
    def can_replay(self) -> bool:
        """Whether messages can be requested again."""
        return self._endpoints.replay is not None

    @property
    def is_connected(self) -> bool:
        """Whether a publisher is connected, as far as the socket has reported."""
        return self._is_connected

    @property
    def num_breaks(self) -> int:
        """Number of connections that have broken so far."""
        return self._num_breaks

    @property
    def silence(self) -> str | None:
        """Reason why the answer to the last request was incomplete; None if it was complete."""
        return self._silence

    def __enter__(self) -> Self:
        """Hold the sockets open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the sockets."""
        self._close()

    def receive(self, timeout_s: float) -> Message | None:
        """Wait for the next message, or for a change of the connection; return None without a message.

        Messages that arrived before the connection broke are returned first.

        Raises:
            RecordingError: a message does not have the frames of KV events.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._socket not in ready and self._monitor in ready:
            self._note(int(recv_monitor_message(self._monitor)["event"]))
        if self._socket in ready or self._socket.poll(0):  # the last one may have come after the first look
            return published(self._socket.recv_multipart(), self.source)
        return None

    def replayed(self, first: int) -> Iterator[Message]:
        """Request all messages from a number on, as far as the publisher has kept them.

        The answer may be incomplete, since a publisher drops messages that its queue cannot hold; `silence` then has
        the reason.

        Raises:
            ConfigurationError: the system refuses the endpoint.
            RecordingError: a message does not have the frames of an answer.
        """
        return self._answer(request_frames(first))

    def snapshot(self) -> list[Message]:
        """Request all stored blocks; return the parts of the answer, all with the number of the next message.

        The list is empty for a publisher without snapshots, such as those of vLLM and SGLang. The answer may be
        incomplete, as with :meth:`replayed`, and the errors are the same.
        """
        return list(self._answer(SNAPSHOT_REQUEST))

    def _answer(self, request: list[bytes]) -> Iterator[Message]:
        endpoint = self._endpoints.replay
        assert endpoint is not None
        self._silence = None
        with self._context.socket(zmq.DEALER) as socket:
            socket.set_hwm(0)
            socket.linger = 0
            connect(socket, endpoint)
            socket.send_multipart(request)
            while socket.poll(REPLAY_PATIENCE_MS):
                message = answered(socket.recv_multipart(), endpoint)
                if message is None:
                    return
                yield message
        self._silence = f"{endpoint} sent no further part of its answer for {REPLAY_PATIENCE_MS / 1000:g} s"

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._num_breaks += 1
        self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
