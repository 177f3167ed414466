"""Paths of the inspector: its page, and the data that the page reads.

::

    GET /inspect                      the page: no data, no key needed
    GET /inspect/page.css, page.js    its parts, also without a key
    GET /inspect/events               server-sent events: "snapshot" once, then "delta", at most 4 a second
    GET /inspect/block/{pool}/{id}    one block
    GET /inspect/prefixes?pool=       the largest cached prefixes
    GET /inspect/history?from=&to=    steps, misses, blocks and requests of a span of time, in seconds

Where API keys exist, all data needs an administrator's key. The page sends it in a header, never in a URL. The front of
a cluster has the same paths for each replica, behind ``/replicas/{name}``.

A ReplayServer serves the page of a replay, in a thread, while another thread runs the replay. It has these paths, and::

    POST /inspect/pause        {"paused": true}: the replay's time stands still until {"paused": false}

It has no paths of models.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from typing import Any, Final, Protocol, final

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response

from pagedkv.connections import SlowCause, uvicorn_config
from pagedkv.errors import ConfigurationError, EngineError
from pagedkv.server.config import Access, Caller, OpenAccess, ServerConfig
from pagedkv.server.engines import LocalEngine
from pagedkv.server.http import ApiError, BodyLimit, add_error_answers, json_response
from pagedkv.server.inspector.inspected import Inspected, InspectedEngine
from pagedkv.server.service import EventStream, Service

MOST_WATCHERS: Final = 16


class Host(Protocol):
    """The server whose application has the page: a service, or the server of a replay's page."""

    @property
    def access(self) -> Access:
        """Identifies callers."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether there is something to watch."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping."""
        ...


def add_inspector(
    app: FastAPI,
    service: Service,
    engine: LocalEngine,
    *,
    has_texts: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Add the inspector to an application, before its service is started.

    Args:
        app: the application.
        service: the application's service.
        engine: the service's engine.
        has_texts: whether a block's tokens and text are shown. A server with tenants shows a caller only its own
            tenant's.
        clock: returns monotonic seconds.
    """
    decode = partial(service.decode, keeps_special=True) if has_texts else None
    inspected = InspectedEngine(engine, decode, clock)
    service.on_step.append(inspected.stepped)
    add_inspected(app, service, inspected)


def add_inspected(app: FastAPI, service: Service, inspected: Inspected) -> None:
    """Add the inspector of an engine in another process to an application.

    Args:
        app: the application; service: its service.
        inspected: the data of the service's engine: :attr:`~pagedkv.server.ProcessEngine.inspected`.
    """
    title = service.config.model_name
    add_inspector_paths(app, service, "/inspect", lambda _: (inspected, title))


def add_inspector_paths(
    app: FastAPI, service: Host, path: str, source: Callable[[Request], tuple[Inspected, str]]
) -> None:
    """Add the inspector's page and the paths of its data to an application.

    Args:
        app: the application; service: its server.
        path: of the page; may have parameters.
        source: returns the engine that a request is about, and the title of its page. Raises ApiError.
    """
    add_page(app, service.access, path, __package__, "page")
    guard = _Guard(service)

    @app.get(f"{path}/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        guard.require_admin(request)
        return guard.watched(*source(request))

    @app.get(f"{path}/block/{{pool:path}}/{{block_id:int}}", include_in_schema=False)
    async def block(request: Request, pool: str, block_id: int) -> Response:
        caller = guard.require_admin(request)
        inspected, _ = source(request)
        return json_response(await inspected.block(pool, block_id, caller.tenant), headers=PAGE_HEADERS)

    @app.get(f"{path}/prefixes", include_in_schema=False)
    async def prefixes(request: Request) -> Response:
        guard.require_admin(request)
        inspected, _ = source(request)
        return json_response(await inspected.prefixes(request.query_params.get("pool")), headers=PAGE_HEADERS)

    @app.get(f"{path}/history", include_in_schema=False)
    async def history(request: Request) -> Response:
        guard.require_admin(request)
        from_s, to_s = _seconds(request, "from", 0.0), _seconds(request, "to", math.inf)
        inspected, _ = source(request)
        return json_response(await inspected.history(from_s, to_s), headers=PAGE_HEADERS)


def _seconds(request: Request, name: str, default: float) -> float:
    given = request.query_params.get(name)
    try:
        seconds = default if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ApiError(400, f"{name} must be seconds since the server began", param=name)
    return seconds


@final
class _Guard:
    """Lets administrators in, and counts watchers."""

    def __init__(self, service: Host) -> None:
        self._service = service
        self._num_watchers = 0

    def require_admin(self, request: Request) -> Caller:
        """Return the caller, an administrator. Raises ApiError, 401 or 403."""
        caller = self._service.access.identify(request.headers)
        if not caller.is_admin:
            raise ApiError(403, "the inspector needs an administrator's key")
        return caller

    def watched(self, inspected: Inspected, title: str) -> Response:
        """Answer with events until the client disconnects or the server drains.

        Raises:
            EngineError: the engine has ended.
            ApiError: MOST_WATCHERS are watching.
        """
        if not self._service.is_alive:
            raise EngineError("there is nothing to watch")
        if self._num_watchers >= MOST_WATCHERS:
            raise ApiError(429, f"{MOST_WATCHERS} pages are watching already, the most that may", retry_after_s=5)
        self._num_watchers += 1

        async def end() -> None:
            self._num_watchers -= 1

        return EventStream(inspected.events(title, lambda: self._service.is_draining), end, PAGE_HEADERS)


NEEDS_KEY: Final = b'data-access="keys"'
OPEN: Final = b'data-access="open"'
PAGE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Headers of pages and of their data: browsers cache nothing, and load nothing from other servers."""


def add_page(app: FastAPI, access: Access, path: str, package: str, name: str) -> None:
    """Add a page, as ``PATH``, ``PATH/NAME.css`` and ``PATH/NAME.js``.

    The page of a server without API keys sends no key; other pages read no data until the user has entered a key.

    Args:
        app: the application.
        access: the access of the application's service.
        path: the page's path.
        package: the package with the page's files in its folder ``static``.
        name: the files' name without its ending.
    """
    static = files(package) / "static"
    html = (static / f"{name}.html").read_bytes()
    is_open = isinstance(access, OpenAccess)
    for own_path, content, kind in (
        (path, html.replace(NEEDS_KEY, OPEN if is_open else NEEDS_KEY), "text/html"),
        (f"{path}/{name}.css", (static / f"{name}.css").read_bytes(), "text/css"),
        (f"{path}/{name}.js", (static / f"{name}.js").read_bytes(), "text/javascript"),
    ):
        app.get(own_path, include_in_schema=False)(_sender(content, kind))


def _sender(content: bytes, kind: str) -> Callable[[], Any]:
    async def send() -> Response:
        return Response(content, headers=PAGE_HEADERS, media_type=kind)

    return send


MOST_BODY_NBYTES: Final = 1024
DRAIN_S: Final = 2.0
JOIN_S: Final = 10.0
"""Most time for the server's thread to end; it does not keep the process alive."""
JSON: Final = "application/json"


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to pause."""

    paused: bool


@final
class ReplayServer:
    """Serves the page of a replay.

    Args:
        inspected: the replay's data.
        title: the page's title.
        access: identifies callers; the data needs an administrator.
        pause: called with whether the replay is to pause, in the server's thread.

    Attributes:
        access, config, is_alive, is_draining: as of a service.
    """

    def __init__(self, inspected: Inspected, title: str, access: Access, pause: Callable[[bool], None]) -> None:
        self.access = access
        self.config = ServerConfig(title, drain_s=DRAIN_S)
        self.is_alive = True
        self.is_draining = False
        self._pause = pause
        self._app = FastAPI(title="pagedkv replay", docs_url=None, redoc_url=None, openapi_url=None)
        self._app.add_middleware(BodyLimit, max_nbytes=MOST_BODY_NBYTES)
        add_error_answers(self._app, lambda _: None)
        add_inspector_paths(self._app, self, "/inspect", lambda _: (inspected, title))
        self._app.post("/inspect/pause")(self._paused)

    def note_slow(self, cause: SlowCause) -> None:
        """Do nothing: no metric counts slow clients."""

    @contextlib.contextmanager
    def running(self, host: str, port: int) -> Iterator[str]:
        """Serve in a thread; yield the page's address.

        Args:
            host, port: where to listen; port 0: any free one.

        Raises:
            ConfigurationError: the server cannot listen there.
        """
        with _listening(host, port) as listening:
            server = uvicorn.Server(uvicorn_config(self._app, self.config, self.note_slow, host=host, port=port))
            thread = threading.Thread(
                target=server.run, kwargs={"sockets": [listening]}, name="pagedkv inspector", daemon=True
            )
            thread.start()
            shown = f"[{host}]" if ":" in host else host
            try:
                yield f"http://{shown}:{listening.getsockname()[1]}/inspect"
            finally:
                self.is_draining = True
                server.should_exit = True
                thread.join(JOIN_S)

    async def _paused(self, request: Request) -> Response:
        if not self.access.identify(request.headers).is_admin:
            raise ApiError(403, "a pause needs an administrator's key")
        if request.headers.get("content-type") != JSON:  # which pages of other origins cannot send unasked
            raise ApiError(415, f"the content type must be {JSON}")
        try:
            asked = msgspec.json.decode(await request.body(), type=_Pause)
        except msgspec.DecodeError as problem:
            raise ApiError(400, f'the body must be {{"paused": true}} or {{"paused": false}}: {problem}') from problem
        self._pause(asked.paused)
        return json_response({"paused": asked.paused}, headers=PAGE_HEADERS)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen at an address. Raises ConfigurationError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as opened:
            opened.enter_context(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
            opened.pop_all()
    except OSError as problem:
        raise ConfigurationError(f"the page cannot be served at {host}:{port} ({problem.strerror})") from None
    with listening:
        yield listening
