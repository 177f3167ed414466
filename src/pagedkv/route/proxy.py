"""Proxy: passes a request to one engine and its answer back, byte for byte.

The body, the path, the query and all headers but those of one connection are the client's; status, headers and body of
the answer are the engine's, compressed or not, each piece of a stream as it comes. Four headers are added to an answer:

    x-pagedkv-replica   the engine
    x-pagedkv-routing   why
    x-pagedkv-cached    tokens of the prompt that the engine was expected to hit; absent where its tokens are not known
    server-timing       milliseconds of tokenising, and of choosing

A request is sent to another engine only as long as nothing was sent to the client, and the engine refused the
connection, ended before its first byte, or answered 503. A client that leaves ends its request at the engine. Every
wait has a bound: a connection, the first byte, the next byte; those for a client are the connection's
(:mod:`pagedkv.connections`).
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import aiohttp
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import NoEngineError
from pagedkv.route.placing import EngineRouter, Placed
from pagedkv.route.prompts import PATHS, Prompt, Prompts

LOG: Final = logging.getLogger("pagedkv.route")
OF_A_CONNECTION: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
    }
)
NOT_PASSED: Final = OF_A_CONNECTION | {"host", "content-length"}
UNAVAILABLE: Final = 503
TOO_LATE: Final = 504
BAD_GATEWAY: Final = 502
TOO_LARGE: Final = 413
SECONDS: Final = 1000.0
MOST_KEPT: Final = 200


@final
class _BrokenAnswerError(ConnectionError):
    """An engine ended within an answer, so the client's connection ends there too."""


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Bounds of waits and sizes.

    Args:
        max_body: bytes of the largest body.
        connect_s: seconds until an engine must have taken a connection.
        first_byte_s: seconds until an engine's first byte: a whole answer, if it is not streamed.
        next_byte_s: most seconds between two pieces of an answer.
        attempts: most engines that a request is sent to.
    """

    max_body: int = 32 * 2**20
    connect_s: float = 5.0
    first_byte_s: float = 600.0
    next_byte_s: float = 300.0
    attempts: int = 3


@dataclass(slots=True)
class Exchange:
    """A request that was routed, for the page and the log."""

    number: int
    began_s: float
    path: str
    prompt: Prompt
    placed: Placed
    choose_s: float
    attempt: int = 1
    status: int | None = None
    first_byte_s: float | None = None
    seconds: float | None = None
    outcome: str = "under way"


@dataclass(slots=True)
class Counts:
    """What happened since the start, for metrics."""

    by_engine_and_reason: Counter[tuple[str, str]] = field(default_factory=Counter)
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    moved: int = 0
    unknown_prompts: int = 0
    refused: int = 0
    broken: int = 0
    left: int = 0


@final
class Proxy:
    """An ASGI application that passes every request on.

    Args:
        router: chooses engines.
        prompts: reads prompts.
        session: talks to engines; made with ``auto_decompress=False``.
        limits: the bounds.
        on_exchange: called when a request has ended.
    """

    def __init__(
        self,
        router: EngineRouter,
        prompts: Prompts,
        session: aiohttp.ClientSession,
        limits: ProxyLimits,
        on_exchange: Callable[[Exchange], None],
    ) -> None:
        self._router = router
        self._prompts = prompts
        self._session = session
        self._limits = limits
        self._on_exchange = on_exchange
        self.latest: deque[Exchange] = deque(maxlen=MOST_KEPT)
        self.counts = Counts()
        self._turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            body = await self._body(Request(scope, receive))
        except ClientDisconnect:
            return
        if body is None:
            await self._refuse(send, scope, TOO_LARGE, f"the body has more than {self._limits.max_body:,} bytes")
            return
        work = asyncio.create_task(self._serve(scope, body, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                self.counts.left += 1
            for task in (work, gone):
                task.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _body(self, request: Request) -> bytes | None:
        """Read a body; None: it is too large."""
        pieces, nbytes = [], 0
        async for piece in request.stream():
            nbytes += len(piece)
            if nbytes > self._limits.max_body:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        path, headers = scope["path"], _headers(scope)
        prompt = await self._prompt(scope, body, headers)
        refused: dict[str, str] = {}
        for attempt in range(1, self._limits.attempts + 1):
            began_s = time.perf_counter()
            try:
                placed = self._router.choose(
                    prompt.token_ids, keys=prompt.keys, num_tokens=prompt.num_tokens, without=refused
                )
            except NoEngineError as problem:
                told = "; ".join(f"{url}: {reason}" for url, reason in refused.items()) or str(problem)
                await self._refuse(send, scope, UNAVAILABLE if not refused else BAD_GATEWAY, told)
                return
            choose_s = time.perf_counter() - began_s
            exchange = Exchange(placed.number, time.time(), path, prompt, placed, choose_s, attempt)
            self.latest.append(exchange)
            try:
                is_done = await self._exchange(scope, body, send, exchange, is_last=attempt == self._limits.attempts)
            finally:
                self._router.ended(placed)
                exchange.seconds = time.time() - exchange.began_s
                self._on_exchange(exchange)
            if is_done:
                return
            refused[placed.url] = exchange.outcome
            self.counts.moved += 1
            LOG.warning("request %d moves from %s: %s", placed.number, placed.url, exchange.outcome)
        told = "; ".join(f"{url}: {reason}" for url, reason in refused.items())
        await self._refuse(send, scope, BAD_GATEWAY, f"no engine has taken the request: {told}")

    async def _prompt(self, scope: Scope, body: bytes, headers: Mapping[str, str]) -> Prompt:
        if scope["method"] != "POST" or scope["path"] not in PATHS:
            return Prompt(None, NO_KEYS, 0, 0.0, "a path without a prompt")
        up = self._router.urls_up
        self._turn += 1
        url = up[self._turn % len(up)] if up else None
        return await self._prompts.read(scope["path"], body, url, headers.get("authorization"))

    async def _exchange(self, scope: Scope, body: bytes, send: Send, exchange: Exchange, *, is_last: bool) -> bool:
        """Send a request to its engine, and the answer to the client. Return False: another engine may take it."""
        placed, limits = exchange.placed, self._limits
        raw = scope.get("raw_path") or scope["path"].encode()
        query = scope["query_string"]
        target = URL(
            placed.url + raw.decode("latin-1") + ("?" + query.decode("latin-1") if query else ""), encoded=True
        )
        passed = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.decode("latin-1") not in NOT_PASSED
        ]
        started = False
        try:
            async with asyncio.timeout(limits.first_byte_s) as first_byte:
                data = body if body or scope["method"] in {"POST", "PUT", "PATCH"} else None
                async with self._session.request(
                    scope["method"], target, data=data, headers=passed, allow_redirects=False
                ) as answer:
                    if answer.status == UNAVAILABLE and not is_last:
                        exchange.outcome = "it answered 503"
                        self._router.take_back(placed)
                        return False
                    exchange.status = answer.status
                    pieces = answer.content.iter_any()
                    piece = await anext(pieces, b"")
                    first_byte.reschedule(None)
                    exchange.first_byte_s = time.time() - exchange.began_s
                    self._router.prefilled(placed)
                    started = True
                    begun = {"type": "http.response.start", "status": answer.status}
                    await send({**begun, "headers": _answer(answer, exchange)})
                    while piece:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                        async with asyncio.timeout(limits.next_byte_s):
                            piece = await anext(pieces, b"")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            exchange.outcome = "answered"
        except asyncio.CancelledError:
            exchange.outcome = "its client has left"
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            return await self._failed(send, scope, exchange, problem, started=started)
        self._count(exchange)
        return True

    async def _failed(self, send: Send, scope: Scope, exchange: Exchange, problem: Exception, *, started: bool) -> bool:
        told = f"{type(problem).__name__} {problem}".strip()[:200]
        placed = exchange.placed
        if started:
            self.counts.broken += 1
            exchange.outcome = f"broken within its answer: {told}"
            LOG.warning("request %d at %s: %s", placed.number, placed.url, exchange.outcome)
            raise _BrokenAnswerError(exchange.outcome) from problem
        if isinstance(problem, TimeoutError) and not isinstance(problem, aiohttp.ServerTimeoutError):
            exchange.outcome = f"no byte within {self._limits.first_byte_s:g} s"
            await self._refuse(send, scope, TOO_LATE, f"{placed.url} has sent {exchange.outcome}")
            return True
        self._router.take_back(placed)
        if isinstance(problem, aiohttp.ClientConnectorError):
            self._router.note_health(placed.url, is_up=False, is_gone=True)
        exchange.outcome = f"it has not taken it ({told})"
        return False

    def _count(self, exchange: Exchange) -> None:
        placed, counts = exchange.placed, self.counts
        counts.by_engine_and_reason[placed.url, placed.reason] += 1
        if exchange.prompt.token_ids is None:
            counts.unknown_prompts += exchange.path in PATHS
        else:
            counts.prompt_tokens += placed.num_tokens
            counts.predicted_tokens += placed.num_predicted

    async def _refuse(self, send: Send, scope: Scope, status: int, told: str) -> None:
        """Answer with an error of the router's own, in the form of the path's protocol."""
        self.counts.refused += 1
        LOG.warning("%s %s: %d, %s", scope["method"], scope["path"], status, told)
        message = f"pagedkv route: {told}"
        body: dict[str, Any] = {"error": {"message": message, "type": "server_error", "param": None, "code": "route"}}
        if scope["path"].startswith("/v1/messages"):
            body = {"type": "error", "error": {"type": "api_error", "message": message}}
        headers = [(b"content-type", b"application/json")]
        headers += [(b"retry-after", b"1")] if status == UNAVAILABLE else []
        encoded = msgspec.json.encode(body)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": encoded, "more_body": False})


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _answer(answer: aiohttp.ClientResponse, exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer: the engine's, and the router's own."""
    placed = exchange.placed
    passed = [
        (name, value) for name, value in answer.raw_headers if name.decode("latin-1").lower() not in OF_A_CONNECTION
    ]
    timing = f"tokenise;dur={SECONDS * exchange.prompt.seconds:.3f}, choose;dur={SECONDS * exchange.choose_s:.3f}"
    own = {"x-pagedkv-replica": placed.url, "x-pagedkv-routing": placed.reason, "server-timing": timing}
    if exchange.prompt.token_ids is not None:
        own["x-pagedkv-cached"] = str(placed.num_predicted)
    return [*passed, *((name.encode(), value.encode("latin-1", "replace")) for name, value in own.items())]
