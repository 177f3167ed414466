"""Sockets bound to an address before a model is loaded: a port in use is found first, and nothing takes it later.

They do not listen yet: a client that comes too early is refused, instead of waiting for a model.
"""

import errno
import socket
from contextlib import ExitStack

from pagedkv.errors import ConfigurationError


def bound(host: str, port: int, host_option: str = "host", port_option: str = "port") -> list[socket.socket]:
    """Bind a socket to each address of a host; port 0 is any free one, the same for all.

    Args:
        host, port: the address.
        host_option, port_option: what names them, for the message.

    Raises:
        ConfigurationError: the port is in use, or the machine has no such address.
    """
    try:
        with ExitStack() as bound_so_far:
            sockets: list[socket.socket] = []
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                one = socket.socket(family, kind, protocol)
                bound_so_far.callback(one.close)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    _bind(one, (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
                except OSError as problem:
                    if sockets and problem.errno == errno.EADDRNOTAVAIL:  # localhost, on a machine without IPv6
                        one.close()
                        continue
                    raise
                sockets.append(one)
            bound_so_far.pop_all()
            return sockets
    except OSError as problem:
        raise ConfigurationError(
            f"the server cannot listen at {host}:{port} ({problem.strerror}): name another {host_option} or "
            f"{port_option}"
        ) from None


def _bind(one: socket.socket, address: tuple[object, ...]) -> None:
    """Bind, so that no other socket can be bound there, as far as the system allows.

    Where connections of an earlier server are still being closed, an address can only be shared; then a second server
    that starts in the same moments is found when it listens.
    """
    try:
        one.bind(address)
    except OSError as problem:
        if problem.errno != errno.EADDRINUSE:
            raise
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
