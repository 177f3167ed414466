"""Sockets at endpoints: bound or connected, IPv6 where the address is one, refusals as errors of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.contract.extras import needing
from pagedkv.memory.wire import WHAT_TO_NAME

with needing("record", "a stream of KV events"):
    import zmq

__all__ = ["bind", "connect", "is_ipv6", "refusals", "require_endpoint"]


def require_endpoint(endpoint: str) -> None:
    """Refuse what is no endpoint. Raises ConfigurationError."""
    scheme, found, rest = endpoint.partition("://")
    if not found or scheme not in {"tcp", "ipc"} or not rest:
        raise ConfigurationError(f"{endpoint!r} is no endpoint. {WHAT_TO_NAME}")


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
    """Return whether an address is IPv6. For names, sockets that allow both versions would try only the first one."""
    return "[" in endpoint


@contextmanager
def refusals(endpoint: str) -> Iterator[None]:
    """Turn the system's refusal of an endpoint into a ConfigurationError."""
    try:
        yield
    except zmq.ZMQError as error:
        raise ConfigurationError(f"{endpoint} cannot be used: {error.strerror}. {WHAT_TO_NAME}") from error
