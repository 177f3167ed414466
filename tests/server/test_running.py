"""Clients that stop in the middle, or send without an end, over real sockets."""

import gc
import json
import socket
import ssl
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pagedkv.errors import ConfigurationError
from pagedkv.server import ServerConfig, Service
from pagedkv.server.running import settled
from tests.server.conftest import Running
from tests.server.serving import HOST, PATIENCE_S, Script, local_engine, make_service, running, running_server
from tests.server.test_exchange import wait_until_idle
from tests.server.test_metrics import numbers

TLS: Final = Path(__file__).parents[1] / "cli" / "tls"
DEADLINES: Final[dict[str, Any]] = {"header_deadline_s": 0.2, "body_deadline_s": 0.2, "write_deadline_s": 0.2}
JSON: Final = b" HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
HEAD: Final = b"POST /v1/chat/completions" + JSON


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


def endless(begin: bytes, piece: bytes) -> Iterator[bytes]:
    """Write 64 MiB of a request that never ends."""
    yield begin
    for _ in range(2**26 // 2**16):
        yield piece * (2**16 // len(piece))


CHUNKED: Final = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        (b"GET / HTTP/1.1\r\n", b"a: " + b"b" * 1000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\na: ", b"b"),
        (b"GET / HTTP/1.1\r\n", b"b"),
        (b"GET /", b"b"),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"a: b\r\n"),
        (CHUNKED + b"1\r\n{\r\n0\r\na: ", b"b"),
        (CHUNKED + b"1;", b"b"),
    ],
    ids=["many", "large", "one value", "one name", "path", "trailers", "one trailer", "extension of a chunk"],
)
def test_headers_without_an_end_end_their_connection(server: Running, begin: bytes, piece: bytes) -> None:
    """Of 64 MiB the server takes what fits into its bounds and the buffers of sockets, and keeps nothing of it."""
    num_sent = 0
    tracemalloc.start()
    try:
        with connected(server.url) as client, suppress(BrokenPipeError, ConnectionResetError):
            for sent in endless(begin, piece):
                client.sendall(sent)
                num_sent += len(sent)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_sent < 2**24
    assert most < 2**21


def test_a_large_header_is_answered_431(server: Running) -> None:
    with connected(server.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300)
        assert client.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_headers_within_the_bounds_are_taken_on_one_connection_again_and_again(server: Running) -> None:
    """The bounds are those of a request."""
    headers = {f"x-{number}": "b" * 200 for number in range(240)}
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.get("/health", headers=headers).status_code == 200


def test_requests_that_wait_for_an_answer_are_bounded(server: Running) -> None:
    wish = {"model": "small", "prompt": "first", "max_tokens": 500, "ignore_eos": True}
    body = json.dumps(wish).encode()
    with connected(server.url) as client:
        client.sendall(b"POST /v1/completions" + JSON % len(body) + body + b"GET /health HTTP/1.1\r\n\r\n" * 100)
        with suppress(ConnectionResetError):
            assert read_all(client).count(b"HTTP/1.1 ") <= 1
    wait_until_idle(server.service)


def test_a_server_that_drains_says_so_on_its_socket_and_ends_what_is_under_way() -> None:
    service = make_service(Script(), drain_s=PATIENCE_S)
    wish = {"model": "small", "prompt": "first", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        running_server(service) as (url, server),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=wish) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert client.get("/ready").status_code == 200
        server.should_exit = True
        until = time.monotonic() + PATIENCE_S
        while not service.is_draining:
            assert time.monotonic() < until, "the server does not drain"
        with httpx.Client(base_url=url) as newcomer:
            assert newcomer.get("/ready").status_code == 503
            refused = newcomer.post("/v1/completions", json=wish)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        *_, last = filter(None, lines)
    assert last == "data: [DONE]"


def test_a_silent_client_of_an_encrypted_connection_does_not_delay_the_end() -> None:
    service = make_service(Script())
    certificate, key = TLS / "certificate.pem", TLS / "key.pem"
    trusting = ssl.create_default_context(cafile=certificate)
    patience_s = 20.0  # event loops wait 30 seconds for the client's end of the encryption
    encrypted = running_server(service, patience_s=patience_s, ssl_certfile=certificate, ssl_keyfile=key)
    with ExitStack() as client_is_open, encrypted as (url, _):
        plain = client_is_open.enter_context(connected(url))
        client = client_is_open.enter_context(trusting.wrap_socket(plain, server_hostname=HOST))
        client.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("outlives", [False, True])
def test_a_server_ends_with_its_engine_unless_it_is_to_go_on(outlives: bool) -> None:  # noqa: FBT001 - a parameter
    service = make_service(Script(), outlives_engine=outlives)
    with running_server(service) as (url, server):
        local_engine(service).running.close()
        until = time.monotonic() + PATIENCE_S
        while not (server.has_lost_engine or (outlives and httpx.get(f"{url}/health").status_code == 503)):
            assert time.monotonic() < until, "the server does not notice"
    assert server.has_lost_engine is not outlives


def test_bodies_that_a_browser_posts_for_any_page_are_refused(server: Running) -> None:
    """A page may post these types without asking first, and a body without a type."""
    wish = json.dumps({"model": "small", "prompt": "first", "max_tokens": 1})
    paths = [
        *("chat/completions", "completions", "responses", "messages", "messages/count_tokens"),
        *("../tokenize", "../detokenize"),
    ]
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        headers = {"content-type": content_type} if content_type else {}
        for path in paths:
            answer = httpx.post(f"{server.url}/v1/{path}", content=wish, headers=headers)
            assert answer.status_code == 415, (path, content_type)
            assert "application/json" in answer.json()["error"]["message"]
    for content_type in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        answer = httpx.post(f"{server.url}/v1/completions", content=wish, headers={"content-type": content_type})
        assert answer.status_code == 200


def test_pages_of_named_origins_alone_may_call() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    chat, other = "https://chat.example.com", "https://other.example.com"
    service = make_service(Script(), cors_origins=(chat,))
    with running(service) as url:
        preflight = httpx.options(f"{url}/v1/chat/completions", headers={**asked, "origin": chat})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == chat
        answer = httpx.get(f"{url}/v1/models", headers={"origin": chat})
        assert answer.headers["access-control-allow-origin"] == chat
        assert "access-control-allow-origin" not in httpx.get(f"{url}/v1/models", headers={"origin": other}).headers
        assert httpx.options(f"{url}/v1/models", headers={**asked, "origin": other}).status_code == 400


def test_what_was_there_before_a_server_is_left_out_of_collections() -> None:
    class Ring:
        """Refers to itself."""

        def __init__(self) -> None:
            self.itself = self

    thresholds = gc.get_threshold()
    older = Ring()
    of_older = weakref.ref(older)
    with settled():
        younger = Ring()
        of_younger = weakref.ref(younger)
        del older, younger
        gc.collect()
        assert of_older() is not None
        assert of_younger() is None
    assert gc.get_threshold() == thresholds
    gc.collect()
    assert of_older() is None
