"""The application: the router's own paths, health checks, the file of engines; everything else goes to an engine.

::

    /health             200: the router runs        /ready   200: an engine is up, else 503
    /metrics            Prometheus
    /route              the page: engines, and where the latest requests went, and why
    /route/engines      the engines as JSON; PUT replaces the list, for administrators
    /route/routes       the latest requests as JSON: counts and reasons, no prompts

Whoever may change the list decides who gets prompts, so PUT needs an administrator's key (``RouteConfig.keys``), and is
refused where there is none; the file of engines is read again whenever it changes, and needs no key. With keys, the
page needs one too. Keys of engines are theirs: requests pass with their own headers.
"""

import asyncio
import hashlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, final

import aiohttp
import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from pagedkv.api_keys import KeyFile
from pagedkv.connections import SlowCause, ended_by_signals, uvicorn_config
from pagedkv.errors import ConfigurationError
from pagedkv.route.engines import as_entries, parse_engines, read_engines
from pagedkv.route.placing import EngineRouter
from pagedkv.route.prompts import Prompts, Tokenizer
from pagedkv.route.proxy import Exchange, Proxy, ProxyLimits

LOG: Final = logging.getLogger("pagedkv.route")
KEPT_ALIVE_S: Final = 4
"""Seconds that an idle connection to an engine is kept: less than the five after which vLLM closes it."""
MODELS_EVERY: Final = 30
"""Health checks between two questions for an engine's adapters."""
FAILURES: Final = 2
"""Health checks in turn that are not answered until an engine is down; a refused connection is enough."""
OK: Final = 200
FORBIDDEN: Final = 403
HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
BUCKETS: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """Settings of the application.

    Args:
        limits: bounds of waits and sizes.
        health_s: seconds between two health checks.
        health_timeout_s: seconds in which an engine must answer one: longer, since one that is busy is not down.
        tokenise_s: most seconds of tokenising; a prompt that takes longer is routed by load.
        engines_file: a file of engines that is read again when it changes.
        keys: keys of administrators; None: the list cannot be changed over HTTP.
        max_header_nbytes: the largest header section of a request; max_headers: most headers of one.
        header_deadline_s, body_deadline_s: seconds in which a client must have sent its headers, and then the body.
        write_deadline_s: seconds in which a client must read a full write buffer.
        drain_s: seconds that requests under way have after SIGTERM.
    """

    limits: ProxyLimits = field(default_factory=ProxyLimits)
    health_s: float = 1.0
    health_timeout_s: float = 5.0
    tokenise_s: float = 2.0
    engines_file: Path | None = None
    keys: KeyFile | None = None
    max_header_nbytes: int = 64 * 2**10
    max_headers: int = 256
    header_deadline_s: float = 15.0
    body_deadline_s: float = 60.0
    write_deadline_s: float = 60.0
    drain_s: float = 30.0


@final
class _Running:
    """What runs while the application does."""

    def __init__(self, router: EngineRouter, config: RouteConfig, tokenizer: Tokenizer | None) -> None:
        self.router = router
        self.config = config
        self._tokenizer = tokenizer
        self.registry = CollectorRegistry()
        made = partial(Histogram, registry=self.registry, buckets=BUCKETS)
        self._choosing = made("pagedkv_route_choose_seconds", "Seconds of choosing an engine")
        self._tokenising = made("pagedkv_route_tokenise_seconds", "Seconds of tokenising a prompt")
        self.registry.register(self)
        self.proxy: Proxy | None = None
        self._session: aiohttp.ClientSession | None = None
        self._failures: dict[str, int] = {}
        self._num_checks = 0

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:  # noqa: ARG002 - as Starlette calls it
        """Hold the connections to engines; check them."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S)
        limits = self.config.limits
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s)
        jar = aiohttp.DummyCookieJar()
        names = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=jar, skip_auto_headers=names
        ) as session:
            self._session = session
            prompts = Prompts(session, self.config.tokenise_s, self._tokenizer)
            self.proxy = Proxy(self.router, prompts, session, limits, self._ended)
            await self._check_all(prompts)
            tasks = [asyncio.create_task(self._check_always(prompts))]
            if self.config.engines_file is not None:
                tasks.append(asyncio.create_task(self._read_always(self.config.engines_file)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, exchange: Exchange) -> None:
        self._choosing.observe(exchange.choose_s)
        if exchange.prompt.token_ids is not None:
            self._tokenising.observe(exchange.prompt.seconds)
        placed = exchange.placed
        LOG.info(
            "request %d: %d tokens go to %s: %s; %s",
            placed.number,
            placed.num_tokens,
            placed.url,
            placed.reason,
            exchange.outcome,
        )

    # Engines

    async def _check_always(self, prompts: Prompts) -> None:
        while True:
            await asyncio.sleep(self.config.health_s)
            await self._check_all(prompts)

    async def _check_all(self, prompts: Prompts) -> None:
        urls = [engine.url for engine in self.router.engines]
        await asyncio.gather(*(self._check(url) for url in urls))
        if self._num_checks % MODELS_EVERY == 0:
            found = await asyncio.gather(*(self._adapters(url) for url in self.router.urls_up))
            prompts.adapters = frozenset().union(*found)
        self._num_checks += 1

    async def _check(self, url: str) -> None:
        assert self._session is not None
        is_gone = False
        try:
            async with asyncio.timeout(self.config.health_timeout_s), self._session.get(f"{url}/health") as answer:
                is_up = answer.status == OK
        except aiohttp.ClientConnectorError:
            is_up, is_gone = False, True
        except (aiohttp.ClientError, OSError, TimeoutError):
            is_up = False
        self._failures[url] = 0 if is_up else self._failures.get(url, 0) + 1
        if is_up or is_gone or self._failures[url] >= FAILURES:
            self.router.note_health(url, is_up=is_up, is_gone=is_gone)

    async def _adapters(self, url: str) -> frozenset[str]:
        """Return the models of an engine that are adapters of another one; none if it does not tell."""
        assert self._session is not None
        try:
            async with asyncio.timeout(self.config.health_timeout_s), self._session.get(f"{url}/v1/models") as answer:
                models = msgspec.json.decode(await answer.read())["data"]
                return frozenset(each["id"] for each in models if each.get("parent"))
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, TypeError, KeyError, AttributeError):
            return frozenset()

    async def _read_always(self, path: Path) -> None:
        """Read the file of engines again when it has changed; a wrong one changes nothing, and is told once."""
        known = _stamp(path)
        while True:
            await asyncio.sleep(self.config.health_s)
            stamp = _stamp(path)
            if stamp == known:
                continue
            known = stamp
            try:
                self.router.set_engines(read_engines(path))
                LOG.warning("%s has changed: %d engines", path, len(self.router.engines))
            except ConfigurationError as problem:
                LOG.warning("%s is not used: %s", path, problem)

    # Pages

    def is_admin(self, request: Request) -> bool:
        """Return whether a request has an administrator's key."""
        keys = self.config.keys
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        owner = None if keys is None else keys.owners.get(hashlib.sha256(given.encode()).hexdigest())
        return owner is not None and owner.is_admin

    async def health(self, request: Request) -> Response:  # noqa: ARG002 - as Starlette calls it
        """Answer that the router runs."""
        return Response(headers=HEADERS)

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        """Answer whether an engine is up."""
        return Response(status_code=OK if self.router.urls_up else 503, headers=HEADERS)

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Answer with metrics."""
        return Response(generate_latest(self.registry), headers=HEADERS, media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:  # noqa: ARG002
        """Answer with the page, which reads the data."""
        return Response(
            (files(__package__) / "static" / "route.html").read_bytes(), headers=HEADERS, media_type="text/html"
        )

    async def engines(self, request: Request) -> Response:
        """Answer with the engines, or replace them."""
        if request.method == "PUT":
            if not self.is_admin(request):
                told = "the list is changed with an administrator's key, or in the file of engines"
                return _json({"error": told}, FORBIDDEN)
            body = b""
            async for piece in request.stream():
                body += piece
                if len(body) > self.config.limits.max_body:
                    return _json({"error": "too large"}, 413)
            try:
                self.router.set_engines(parse_engines(body, "the body"))
            except ConfigurationError as problem:
                return _json({"error": str(problem)}, 400)
        elif self.config.keys is not None and not self.is_admin(request):
            return _json({"error": "the page needs an administrator's key"}, FORBIDDEN)
        return _json(as_entries(self.router.engines))

    async def routes(self, request: Request) -> Response:
        """Answer with the state of engines and the latest requests."""
        if self.config.keys is not None and not self.is_admin(request):
            return _json({"error": "the page needs an administrator's key"}, FORBIDDEN)
        assert self.proxy is not None
        engines = [
            {
                **asdict(each),
                "engine": each.engine.url,
                "is_draining": each.engine.is_draining,
                "kv_events": each.engine.kv_events,
            }
            for each in self.router.statuses()
        ]
        counts = self.proxy.counts
        return _json(
            {
                "engines": engines,
                "prompt_tokens": counts.prompt_tokens,
                "predicted_tokens": counts.predicted_tokens,
                "moved": counts.moved,
                "routes": [_route(each) for each in reversed(self.proxy.latest)],
            }
        )

    def collect(self) -> list[Any]:
        """Give the metrics that are counted elsewhere, as prometheus_client asks for them."""
        prefix = "pagedkv_route_"
        found: list[Any] = []
        if self.proxy is None:
            return found
        counts = self.proxy.counts
        routed = CounterMetricFamily(prefix + "requests", "Answered requests", labels=["engine", "reason"])
        for (url, reason), number in counts.by_engine_and_reason.items():
            routed.add_metric([url, reason], number)
        found.append(routed)
        for name, told, value in (
            ("prompt_tokens", "Tokens of prompts whose tokens were known", counts.prompt_tokens),
            ("predicted_tokens", "Of these, tokens that were expected to be cached", counts.predicted_tokens),
            ("moved", "Requests that an engine had not taken, and another one was asked", counts.moved),
            ("unknown_prompts", "Requests whose tokens were not known", counts.unknown_prompts),
            ("refused", "Requests that the router refused", counts.refused),
            ("broken", "Answers that ended in the middle", counts.broken),
            ("left", "Requests whose client left", counts.left),
        ):
            found.append(CounterMetricFamily(prefix + name, told, value=value))
        gauges = {
            name: GaugeMetricFamily(prefix + "engine_" + name, told, labels=["engine"])
            for name, told in (
                ("up", "1: it answers health checks"),
                ("blocks", "Its blocks that are known"),
                ("waiting", "Requests without a first token"),
                ("decoding", "Requests with one"),
                ("lost_batches", "Batches of its events that were lost"),
                ("index", "2: exact, 1: degraded, 0: empty"),
            )
        }
        for each in self.router.statuses():
            labels = [each.engine.url]
            gauges["up"].add_metric(labels, each.is_up)
            gauges["blocks"].add_metric(labels, each.num_blocks)
            gauges["waiting"].add_metric(labels, each.num_waiting)
            gauges["decoding"].add_metric(labels, each.num_decoding)
            gauges["lost_batches"].add_metric(labels, each.num_lost_batches)
            gauges["index"].add_metric(labels, {"exact": 2, "degraded": 1}.get(each.index, 0))
        return [*found, *gauges.values()]


def _stamp(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None


def _json(body: object, status: int = OK) -> Response:
    return Response(msgspec.json.encode(body), status, HEADERS, "application/json")


def _route(each: Exchange) -> dict[str, Any]:
    placed, prompt = each.placed, each.prompt
    return {
        "request": each.number,
        "at_s": round(each.began_s, 3),
        "path": each.path,
        "attempt": each.attempt,
        "engine": placed.url,
        "reason": placed.reason,
        "num_tokens": placed.num_tokens,
        "num_predicted": placed.num_predicted if prompt.token_ids is not None else None,
        "problem": prompt.problem,
        "tokenise_ms": round(1000 * prompt.seconds, 3),
        "choose_ms": round(1000 * each.choose_s, 3),
        "first_byte_s": each.first_byte_s,
        "seconds": each.seconds,
        "status": each.status,
        "outcome": each.outcome,
        "explanation": placed.choice.explain(),
    }


def create_app(
    router: EngineRouter, config: RouteConfig | None = None, tokenizer: Tokenizer | None = None
) -> Starlette:
    """Build the application.

    Args:
        router: chooses engines; the caller closes it.
        config: settings.
        tokenizer: of transformers, in place of the engines' /tokenize.
    """
    running = _Running(router, config or RouteConfig(), tokenizer)

    async def passed_on(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
        assert running.proxy is not None
        await running.proxy(scope, receive, send)

    return Starlette(
        routes=[
            Route("/health", running.health),
            Route("/ready", running.ready),
            Route("/metrics", running.metrics),
            Route("/route", running.page),
            Route("/route/engines", running.engines, methods=["GET", "PUT"]),
            Route("/route/routes", running.routes),
            Mount("/", app=passed_on),
        ],
        lifespan=running.lifespan,
    )


@final
class RouteServer(uvicorn.Server):
    """Uvicorn's server of the application: bounded connections, and a word when it listens.

    Args:
        app: the application; config: its settings.
        on_start: called when requests can come.
    """

    def __init__(self, app: Starlette, config: RouteConfig, on_start: Callable[[], None]) -> None:
        critical = {"log_level": "critical", "date_header": False}  # a broken answer is told by the proxy
        super().__init__(uvicorn_config(app, config, _note_slow, **critical))
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        if self.started:
            self._on_start()


def _note_slow(cause: SlowCause) -> None:
    LOG.info("a client was too slow (%s): its connection is closed", cause)


def run(app: Starlette, config: RouteConfig, sockets: list[socket.socket], on_start: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once.

    Args:
        app: the application; config: its settings.
        sockets: bound sockets (:func:`pagedkv.listening.bound`).
        on_start: called when requests can come.
    """
    with ended_by_signals():
        RouteServer(app, config, on_start).run(sockets)
