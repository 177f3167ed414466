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
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, final

from fastapi import FastAPI, Request
from starlette.responses import Response

from pagedkv.errors import EngineError
from pagedkv.server.access import Access, Caller
from pagedkv.server.engines import LocalEngine
from pagedkv.server.errors import ApiError, json_response
from pagedkv.server.exchange import EventStream
from pagedkv.server.inspector.inspected import Inspected, InspectedEngine
from pagedkv.server.service import Service
from pagedkv.server.static_pages import PAGE_HEADERS, add_page

__all__ = ["Host", "add_inspected", "add_inspector", "add_inspector_paths"]

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
