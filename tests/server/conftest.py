"""One server for all tests that need no other."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pagedkv.server import Service
from tests.server.serving import Script, make_service, running


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Args:
        url: its address; service: what serves; script: writes its answers.
    """

    url: str
    service: Service
    script: Script


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """Run a server without keys."""
    script = Script()
    service = make_service(script)
    with running(service) as url:
        yield Running(url, service, script)
