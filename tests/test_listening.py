"""An address is taken before a model is loaded, and stays taken."""

import socket

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.listening import bound


def test_a_bound_port_is_refused_to_a_second_server_although_nothing_listens_yet() -> None:
    (one,) = bound("127.0.0.1", 0)
    port = one.getsockname()[1]
    with pytest.raises(ConfigurationError, match=f"cannot listen at 127.0.0.1:{port}"):
        bound("127.0.0.1", port)
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)), "a client waits for a model"
    one.close()
    (again,) = bound("127.0.0.1", port)
    again.close()


def test_a_port_whose_last_connections_are_being_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = before.accept()
            accepted.close()  # first, so that this end waits
            assert client.recv(1) == b""
    (one,) = bound("127.0.0.1", port)
    one.close()


def test_all_addresses_of_a_host_get_the_same_port() -> None:
    sockets = bound("localhost", 0)
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        each.close()
