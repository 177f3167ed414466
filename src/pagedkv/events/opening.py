"""Binds and connects sockets, also with IPv6, and turns the system's errors into ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.wire import ENDPOINT_ADVICE

with needing("record", "a stream of KV events"):
    import zmq

__all__ = ["bind", "connect", "is_ipv6", "refusals", "require_endpoint"]


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
