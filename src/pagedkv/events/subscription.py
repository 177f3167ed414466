"""Subscription: receives the messages of one publisher of KV events, and requests missed ones again.

Before it, what every socket here needs: binding and connecting, also with IPv6, with the system's errors as ours.

Missed messages are requested at a second socket, if the publisher has one. The request is a number; the answer has the
messages from that number on, as far as the publisher has kept them, then an end. ZeroMQ reconnects by itself. A
reconnection is reported, since a restarted process counts from 0 and sends no other sign of the restart.

Payloads are not decoded here.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.wire import ENDPOINT_ADVICE, SNAPSHOT_REQUEST, Message, answered, published, request_frames

with needing("record", "a stream of KV events"):
    import zmq
    from zmq.utils.monitor import recv_monitor_message

__all__ = ["Endpoints", "Subscription", "bind", "connect", "is_ipv6", "refusals", "require_endpoint"]

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the sockets."""
        self._close()

    def receive(self, timeout_s: float) -> Message | None:
        """Wait for the next message, or for a change of the connection; return None without a message.

        Messages that arrived before the connection broke are returned first.

        Raises:
            RecordingError: a message does not have the frames of KV events.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._socket in ready:
            return published(self._socket.recv_multipart(), self.source)
        if self._monitor in ready:
            self._note(int(recv_monitor_message(self._monitor)["event"]))
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
