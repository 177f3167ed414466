"""An address that cannot be listened at is refused before a model is loaded."""

import socket

import pytest

from pagedkv.cli.options import require_free
from pagedkv.errors import ConfigurationError


def test_a_port_in_use_is_refused_and_a_free_one_is_not() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen at 127.0.0.1:{port}"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)
    require_free("127.0.0.1", 0)


def test_an_address_of_no_interface_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen at 203\.0\.113\.77:8000"):
        require_free("203.0.113.77", 8000)
