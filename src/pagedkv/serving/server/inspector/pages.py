"""Paths of the inspector: its page, and the data that the page reads.

::

    GET /inspect                      the page: no data, no key needed
    GET /inspect/page.css, page.js    its parts, also without a key
    GET /inspect/events               server-sent events: "snapshot" once, then "delta", at most 4 a second
    GET /inspect/block/{pool}/{id}    one block
    GET /inspect/prefixes?pool=       the largest cached prefixes
    GET /inspect/history?from=&to=    steps, misses, blocks and requests of a span of time, in seconds

Where API keys exist, all data needs an administrator's key. The page sends it in a header, never in a URL.
"""

import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, final

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from pagedkv.memory.contract.errors import BlockError, ConfigurationError, EngineError
from pagedkv.memory.space import SpaceInspection
from pagedkv.serving.server.access import Caller
from pagedkv.serving.server.engines import LocalEngine
from pagedkv.serving.server.errors import ApiError
from pagedkv.serving.server.event_stream import EventStream, event
from pagedkv.serving.server.inspector.buckets import as_buckets, width_for
from pagedkv.serving.server.inspector.history import MOST_TENANTS, STATES_OF_BLOCKS, History
from pagedkv.serving.server.inspector.messages import as_byte_map, as_changes, as_ended, as_snapshot
from pagedkv.serving.server.inspector.prefix_tree import as_tree
from pagedkv.serving.server.inspector.snapshot import Snapshot
from pagedkv.serving.server.inspector.watch import SeenBlock, Watch
from pagedkv.serving.server.json_response import json_response
from pagedkv.serving.server.service import Service
from pagedkv.serving.server.static_pages import PAGE_HEADERS, add_page

__all__ = ["add_inspector"]

MOST_WATCHERS: Final = 16
MOST_SAMPLES: Final = 600
MOST_REQUESTS_OF_A_TIME: Final = 200
DIGITS_OF_DIGEST: Final = 16


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
    inspection = SpaceInspection()
    core = engine.llm.core
    core.space.observe(inspection)
    history = History(core, inspection, clock)
    core.on_entered.append(history.note_arrived)
    service.on_step.append(history.note_step)
    inspector = _Inspector(service, Watch(engine, history, inspection, clock), inspection, has_texts=has_texts)
    add_page(app, service.access, "/inspect", __package__, "page")
    _add_data(app, inspector)


def _add_data(app: FastAPI, inspector: "_Inspector") -> None:
    @app.get("/inspect/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        inspector.require_admin(request)
        return inspector.events()

    @app.get("/inspect/block/{pool:path}/{block_id:int}", include_in_schema=False)
    async def block(request: Request, pool: str, block_id: int) -> Response:
        return json_response(
            await inspector.block(inspector.require_admin(request), pool, block_id), headers=PAGE_HEADERS
        )

    @app.get("/inspect/prefixes", include_in_schema=False)
    async def prefixes(request: Request) -> Response:
        inspector.require_admin(request)
        return json_response(await inspector.prefixes(request.query_params.get("pool")), headers=PAGE_HEADERS)

    @app.get("/inspect/history", include_in_schema=False)
    async def history(request: Request) -> Response:
        inspector.require_admin(request)
        from_s, to_s = _seconds(request, "from", 0.0), _seconds(request, "to", math.inf)
        return json_response(await inspector.history(from_s, to_s), headers=PAGE_HEADERS)


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
class _Inspector:
    """Answers the paths."""

    def __init__(self, service: Service, watch: Watch, inspection: SpaceInspection, *, has_texts: bool) -> None:
        self._service = service
        self._watch = watch
        self._inspection = inspection
        self._has_texts = has_texts
        self._num_watchers = 0
        self._delta: tuple[int, int, bytes] = (0, 0, b"")

    def require_admin(self, request: Request) -> Caller:
        """Return the caller, an administrator. Raises ApiError, 401 or 403."""
        caller = self._service.access.identify(request.headers)
        if not caller.is_admin:
            raise ApiError(403, "the inspector needs an administrator's key")
        return caller

    def events(self) -> Response:
        """Answer with events until the client disconnects or the server drains. Raises ApiError above MOST_WATCHERS."""
        if self._num_watchers >= MOST_WATCHERS:
            raise ApiError(429, f"{MOST_WATCHERS} pages are watching already, the most that may", retry_after_s=5)
        self._num_watchers += 1

        async def end() -> None:
            self._num_watchers -= 1

        return EventStream(self._events(), end, PAGE_HEADERS)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            snapshot = await self._watch.latest(0)
            first = as_snapshot(snapshot, self._service.config.model_name, has_texts=self._has_texts)
            yield event(msgspec.json.encode(first), "snapshot")
            while not self._service.is_draining:
                before, snapshot = snapshot, await self._watch.latest(snapshot.version)
                yield self._changes(before, snapshot)
        except EngineError:
            pass
        yield event(b"{}", "end")

    def _changes(self, before: Snapshot, now: Snapshot) -> bytes:
        """Write the event between two snapshots, once for all watchers that have the first one."""
        if self._delta[:2] != (before.version, now.version):
            changes = as_changes(now, [as_byte_map(each) for each in before.maps])
            self._delta = before.version, now.version, event(msgspec.json.encode(changes), "delta")
        return self._delta[2]

    async def block(self, caller: Caller, pool: str, block_id: int) -> dict[str, Any]:
        """Describe one block. Raises ApiError."""
        try:
            seen = await self._watch.block(pool, block_id)
        except (ConfigurationError, BlockError) as problem:
            raise ApiError(404, str(problem)) from problem
        answer = _as_block(seen)
        if self._may_read(caller, seen.details.tenant):
            token_ids = seen.details.token_ids.tolist()
            answer |= {"token_ids": token_ids, "text": self._service.decode(token_ids, keeps_special=True)}
        return answer

    def _may_read(self, caller: Caller, tenant: str | None) -> bool:
        if not self._has_texts:
            return False
        if caller.tenant is None:
            return len(self._inspection.tenant_names) == 1
        return caller.tenant == tenant

    async def prefixes(self, pool: str | None) -> dict[str, Any]:
        """Describe the largest cached prefixes. Raises ApiError."""
        try:
            prefixes = await self._watch.prefixes(self._inspection.pool_names[0] if pool is None else pool)
        except ConfigurationError as problem:
            raise ApiError(404, str(problem)) from problem
        return {**as_tree(prefixes), "tenants": [name or "" for name in self._inspection.tenant_names]}

    async def history(self, from_s: float, to_s: float) -> dict[str, Any]:
        """Describe a span of time."""
        answer = await self._watch.history(from_s, to_s, MOST_REQUESTS_OF_A_TIME)
        now_s = answer["now_s"]
        first_s = float(answer["steps"][0, 0]) if len(answer["steps"]) else now_s
        samples = answer["samples"][:: max(1, math.ceil(len(answer["samples"]) / MOST_SAMPLES))]
        num_numbers = len(STATES_OF_BLOCKS) + 2 * MOST_TENANTS
        shape = len(samples), len(self._inspection.pool_names), num_numbers
        numbers = samples[:, 1:].reshape(shape).astype(int)
        by_tenant = numbers[:, :, len(STATES_OF_BLOCKS) :].reshape(*shape[:2], MOST_TENANTS, 2)
        return {
            "now_s": round(now_s, 3),
            "buckets": as_buckets(answer["steps"], answer["admissions"], width_for(min(to_s, now_s) - first_s)),
            "block_states": STATES_OF_BLOCKS,
            "samples": {
                "time_s": samples[:, 0].round(3).tolist(),
                "pools": numbers[:, :, : len(STATES_OF_BLOCKS)].tolist(),
                "shares": by_tenant[:, :, : len(self._inspection.tenant_names)].tolist(),
            },
            "requests": as_ended(answer["requests"], answer["tenants"], answer["tier_notes"]),
        }


def _as_block(seen: SeenBlock) -> dict[str, Any]:
    details = seen.details
    lease_s = seen.lease_s
    return {
        "pool": details.pool,
        "block": details.block_id,
        "state": details.state.name.lower(),
        "tenant": details.tenant,
        "group": details.group,
        "num_tokens": len(details.token_ids),
        "parent": details.parent,
        "digest": None if details.digest is None else details.digest.hex()[:DIGITS_OF_DIGEST],
        "references": details.ref_count,
        "holders": [{"number": holder.number, "tenant": holder.tenant} for holder in seen.holders],
        "hits": details.num_hits,
        "lives": details.num_lives,
        "lease_s": None if lease_s is None or math.isinf(lease_s) else round(lease_s, 1),
        "has_priority": lease_s is not None and math.isinf(lease_s),
        "unchanged_s": None if seen.unchanged_s is None else round(seen.unchanged_s, 1),
        "may_be_longer": seen.is_longer,
    }
