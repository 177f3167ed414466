"""One Redis server and one S3 for all tests of tiers."""

from collections.abc import Iterator

import pytest

from tests.tiers.bodies import redis_server, s3_server


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of a running server."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of a running S3."""
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url
