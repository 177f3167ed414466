"""One Redis server for all tests of tiers."""

from collections.abc import Iterator

import pytest

from tests.tiers.bodies import redis_server


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of a running server."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url
