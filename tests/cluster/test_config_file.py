"""A config file of Ray Serve: fronts and replicas by Serve's own means."""

import socket
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
import ray
from ray import serve

from pagedkv.cluster import front, shut_down
from pagedkv.errors import ConfigurationError

PATIENCE_S: Final = 240.0
ARGS: Final[dict[str, Any]] = {"replicas": 2, "num_blocks": 200, "block_size": 8, "name": "demo", "routing": "prefix"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(front(ARGS), name="pagedkv", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        shut_down()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_fronts_of_serve_answer_and_stream(url: str) -> None:
    body = {"model": "demo", "temperature": 0, "max_tokens": 2, "prompt": "red kite: locker 7. Where? red kite:"}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.json()["choices"][0]["text"].strip() == "locker 7"
    assert answer.headers["x-pagedkv-replica"]
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE_S) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert len(lines) >= 3
    assert lines[-1] == "data: [DONE]"
    told = httpx.get(f"{url}/inspect/routes", timeout=PATIENCE_S).json()
    assert len(told["replicas"]) == 2
    assert told["choices"][0]["reason"] == "it has most of the prompt"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replica": 2}, "unknown arguments replica; known are"),
        ({"replicas": 100}, "num_replicas"),
        ({"routing": "nearest"}, "routing must be one of"),
    ],
)
def test_what_a_config_file_cannot_say_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        front(args)
