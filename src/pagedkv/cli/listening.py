"""Checks whether a server can listen at an address, before anything is loaded."""

import socket

from pagedkv.errors import ConfigurationError

__all__ = ["require_free"]


def require_free(host: str, port: int, host_option: str = "--host", port_option: str = "--port") -> None:
    """Refuse an address at which a server cannot listen now; port 0 is any free one.

    Args:
        host, port: the address.
        host_option, port_option: the options that name them.

    Raises:
        ConfigurationError: the port is in use, or the machine has no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as problem:
        raise ConfigurationError(
            f"the server cannot listen at {host}:{port} ({problem.strerror}): name another {host_option} or "
            f"{port_option}"
        ) from None
