"""Clients that stop in the middle, over real sockets: of a header, of a body, of reading an answer."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pagedkv.errors import ConfigurationError
from pagedkv.server import ServerConfig, Service
from tests.server.conftest import Running
from tests.server.serving import PATIENCE_S, Script, local_engine, make_service, running
from tests.server.test_exchange import wait_until_idle
from tests.server.test_metrics import numbers

DEADLINES: Final[dict[str, Any]] = {"header_deadline_s": 0.2, "body_deadline_s": 0.2, "write_deadline_s": 0.2}
HEAD: Final = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """Run a server with short deadlines."""
    script = Script()
    service = make_service(script, **DEADLINES)
    with running(service, send_nbytes=4096) as url:
        yield Running(url, service, script)


@contextmanager
def connected(url: str, receive_nbytes: int | None = None) -> Iterator[socket.socket]:
    """Connect."""
    with socket.socket() as client:
        if receive_nbytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
        client.settimeout(PATIENCE_S)
        address = urlsplit(url)
        client.connect((address.hostname, address.port))
        yield client


def ended(served: Running, cause: str) -> float:
    """Count connections that were ended for a cause."""
    return numbers(httpx.get(f"{served.url}/metrics").text).get(f"pagedkv:slow_connections_total/{cause}", 0)


def read_all(client: socket.socket) -> bytes:
    """Read until the server ends the connection."""
    pieces = []
    while piece := client.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("cause", "sent"),
    [("header", b""), ("header", b"\r\n"), ("header", b"POST /v1/chat"), ("body", HEAD % 100 + b'{"model"')],
)
def test_a_request_that_does_not_come_ends_its_connection(served: Running, cause: str, sent: bytes) -> None:
    before = ended(served, cause)
    with connected(served.url) as client:
        client.sendall(sent)
        assert read_all(client).startswith(b"HTTP/1.1 408 ")
    assert ended(served, cause) == before + 1


def test_half_a_header_behind_an_answer_ends_the_connection_only_then(served: Running) -> None:
    """The first request is answered whole, although the second one's header is late."""
    wish = {"model": "small", "messages": [{"role": "user", "content": "first"}], "max_tokens": 60, "ignore_eos": True}
    body = json.dumps(wish).encode()
    with connected(served.url) as client:
        client.sendall(HEAD % len(body) + body + b"POST /v1/chat")
        told = read_all(client)
    assert told.startswith(b"HTTP/1.1 200 ")
    assert told.count(b"HTTP/1.1 408 ") == 1
    assert json.loads(told.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1")[0])["usage"]["completion_tokens"] == 60


def test_a_client_that_never_reads_holds_no_blocks(served: Running) -> None:
    core = local_engine(served.service).llm.core
    before = ended(served, "write")
    wish = {
        "model": "small",
        "messages": [{"role": "user", "content": "unread"}],
        "max_tokens": 1000,
        "ignore_eos": True,
        "n": 8,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
    }
    body = json.dumps(wish).encode()
    with connected(served.url, receive_nbytes=4096) as client:
        client.sendall(HEAD % len(body) + body)
        until = time.monotonic() + PATIENCE_S
        while not core.has_work:
            assert time.monotonic() < until, "the request did not begin"
            threading.Event().wait(0.005)
        wait_until_idle(served.service)
    assert ended(served, "write") == before + 1


def test_a_last_answer_that_is_not_read_ends_its_connection(served: Running) -> None:
    """Of a connection that closes behind it: closing alone would wait for the reader."""
    causes: list[str] = []
    service = Service(served.service.engine, ServerConfig("small", write_deadline_s=0.2), served.service.access)
    service.on_slow.append(causes.append)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            assert (await receive())["type"] == "lifespan.startup"
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(16 * 2**20)})

    with running(service, answer) as url, connected(url, receive_nbytes=4096) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        until = time.monotonic() + PATIENCE_S
        while not causes:
            assert time.monotonic() < until, "the connection was not ended"
            threading.Event().wait(0.01)
    assert causes == ["write"]


@pytest.mark.parametrize("name", ["header_deadline_s", "body_deadline_s", "write_deadline_s"])
def test_deadlines_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ServerConfig("small", **cast("dict[str, Any]", {name: 0}))
