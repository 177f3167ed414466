"""Engines that answer as a test says, and a router before them, each a real server on loopback."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import uvicorn
import zmq
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedkv.listening import bound
from pagedkv.route import Engine, EngineRouter, RouteConfig, create_app
from pagedkv.route.app import RouteServer
from pagedkv.route.prompts import Tokenizer

__all__ = ["FakeEngine", "Publisher", "closing", "routed", "served"]


def served(app: ASGIApp) -> AbstractContextManager[str]:
    """Serve an engine in a thread; give its address."""
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    return running(uvicorn.Server(config))


@contextmanager
def running(server: uvicorn.Server) -> Iterator[str]:
    """Run a server in a thread; yield its address, which listens."""
    sockets = bound("127.0.0.1", 0)
    is_started = threading.Event()
    startup = server.startup

    async def starting(sockets: Any = None) -> None:  # noqa: ANN401 - uvicorn's
        await startup(sockets)
        is_started.set()

    server.startup = starting  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    assert is_started.wait(30)
    try:
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class FakeEngine:
    """An engine whose tokens are the bytes of a text; it keeps what it was asked."""

    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [(b"content-type", b"application/json")])
    pieces: tuple[bytes, ...] = (b'{"ok": 1}',)
    ends_early: bool = False
    asked: list[tuple[Scope, bytes]] = field(default_factory=list)
    questions: list[dict[str, Any]] = field(default_factory=list)
    has_left: threading.Event = field(default_factory=threading.Event)
    waits: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        match scope["path"]:
            case "/health":
                await self._answer(send, 200, b"")
            case "/v1/models" if scope["method"] == "GET":
                await self._answer(send, 200, b'{"data": [{"id": "base"}, {"id": "tuned", "parent": "base"}]}')
            case "/tokenize":
                assert dict(scope["headers"])[b"content-type"] == b"application/json", "vLLM refuses others"
                question = json.loads(body)
                self.questions.append(question)
                text = question.get("prompt") or "".join(str(each["content"]) for each in question["messages"])
                await self._answer(send, 200, json.dumps({"tokens": list(text.encode())}).encode())
            case _:
                self.asked.append((scope, body))
                await self._stream(receive, send)

    async def _stream(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if self.waits:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.has_left.set()
            return
        if self.ends_early:
            raise ConnectionResetError
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _answer(send: Send, status: int, body: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@contextmanager
def routed(
    *engines: Engine, config: RouteConfig | None = None, tokenizer: Tokenizer | None = None
) -> Iterator[tuple[httpx.Client, EngineRouter]]:
    """Serve a router before engines; yield a client of it."""
    with EngineRouter(engines) as router:
        settings = config or RouteConfig(health_s=0.05, drain_s=1)
        app = create_app(router, settings, tokenizer)
        with running(RouteServer(app, settings, lambda: None)) as url, httpx.Client(base_url=url, timeout=30) as client:
            yield client, router


@contextmanager
def closing() -> Iterator[tuple[str, list[bytes]]]:
    """Serve what is healthy and closes each connection that brings a POST; yield its address, and what it was sent."""
    posts: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            sent = self.request.recv(65536)
            if sent.startswith(b"POST"):
                if b"/tokenize " not in sent:
                    posts.append(sent)
            else:
                self.request.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", posts
        finally:
            server.shutdown()
            thread.join()


class Publisher:
    """A socket that publishes what a test says, in vLLM's form, and sends nothing again."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.number = 0
        self.sent_s = 1.0

    def await_subscriber(self) -> None:
        """Wait until somebody has subscribed."""
        assert self._socket.poll(30_000)
        self._socket.recv()

    def publish(self, *events: dict[str, Any]) -> None:
        """Publish a batch."""
        self.sent_s += 1
        payload = msgspec.msgpack.encode([self.sent_s, events, 0])
        self._socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
