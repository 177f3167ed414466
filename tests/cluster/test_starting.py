"""What cannot start is refused in seconds, in a sentence, before replicas are asked for."""

import socket
from collections.abc import Iterator

import pytest
import ray

from pagedkv.cluster import ClusterSpec, ReplicaSpec, deploy, shut_down
from pagedkv.engine import EngineConfig
from pagedkv.errors import ConfigurationError

PLAIN = EngineConfig(num_blocks=50, warm_up=False)


@pytest.fixture
def dead_port() -> Iterator[int]:
    """Bind a port at which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_an_address_where_no_cluster_answers_is_refused(dead_port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"no Ray cluster answers at 127.0.0.1:{dead_port}"):
        deploy(ClusterSpec(ReplicaSpec(None, "float32", PLAIN)), address=f"127.0.0.1:{dead_port}")
    assert not ray.is_initialized()
    shut_down()
    assert not ray.is_initialized(), "ending what did not start starts nothing"


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_gpus_that_are_not_there_are_refused() -> None:
    try:
        with pytest.raises(ConfigurationError, match="3 replicas of 64 GPUs need 192, and this machine has"):
            deploy(ClusterSpec(ReplicaSpec(None, "float32", PLAIN), 3, num_gpus=64))
    finally:
        shut_down()
