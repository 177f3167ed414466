"""Paths for those who run a server: health, load, metrics, what is served, the cache; under vLLM's names.

What shows or changes what concerns all tenants needs an administrator's key.
"""

from collections.abc import Callable
from typing import Final, Literal

from fastapi import FastAPI, Request
from pydantic import ConfigDict, with_config
from starlette.responses import Response
from typing_extensions import TypedDict

from pagedkv.server.config import Caller
from pagedkv.server.http import ApiError, json_response
from pagedkv.server.metrics import Metrics
from pagedkv.server.service import Service


@with_config(ConfigDict(extra="forbid"))
class Load(TypedDict):
    """The answer of ``/load``: requests under way."""

    server_load: int


@with_config(ConfigDict(extra="forbid"))
class ServerInfo(TypedDict):
    """The answer of ``/server_info``."""

    version: str
    models: list[str]
    max_model_len: int
    block_size: int
    num_blocks: int
    vocabulary_size: int
    engine: str


@with_config(ConfigDict(extra="forbid"))
class ResetCache(TypedDict):
    """The answer of ``/reset_prefix_cache``."""

    success: bool


@with_config(ConfigDict(extra="forbid"))
class Asleep(TypedDict):
    """The answer of ``/sleep``."""

    status: Literal["sleeping"]
    level: int
    released_bytes: int


@with_config(ConfigDict(extra="forbid"))
class Awake(TypedDict):
    """The answer of ``/wake_up``."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None


@with_config(ConfigDict(extra="forbid"))
class IsSleeping(TypedDict):
    """The answer of ``/is_sleeping``."""

    is_sleeping: bool


BLOCKS_TAG: Final = "kv_cache"
TAGS: Final = frozenset({"weights", BLOCKS_TAG})
"""What vLLM's servers wake by parts; weights are never asleep here."""


def add_operators(app: FastAPI, service: Service, caller_of: Callable[[Request], Caller]) -> None:
    """Add the paths to an application.

    Args:
        app: the application; service: what it serves.
        caller_of: identifies the caller of a request. Raises ApiError.
    """
    metrics = Metrics(service)
    service.on_served.append(metrics.served)
    service.on_step.append(metrics.stepped)
    service.on_slow.append(metrics.slowed)
    service.on_refused.append(metrics.refused)

    def require_administrator(request: Request, what: str) -> None:
        if not caller_of(request).is_admin:
            raise ApiError(403, f"{what} an administrator's key")

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        """Answer 200 while the engine can serve."""
        return Response(status_code=200 if service.is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Answer 200 while the server accepts new requests, and has an engine that can serve them."""
        return Response(status_code=200 if service.is_ready else 503)

    @app.get("/metrics")
    async def numbers(request: Request) -> Response:
        """Answer with the server's metrics, for Prometheus. Where API keys exist, an administrator's key is needed."""
        require_administrator(request, "metrics need")
        await metrics.read_engine()
        text, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    @app.get("/version")
    async def own_version() -> Response:
        return json_response({"version": app.version})

    @app.get("/load")
    async def load(request: Request) -> Response:
        """Answer with the number of requests under way."""
        caller_of(request)
        return json_response({"server_load": len(service.under_way)})

    @app.get("/server_info")
    async def information(request: Request) -> Response:
        """Answer with what is served, and what the engine chose."""
        require_administrator(request, "information about the server needs")
        facts = service.engine.facts
        return json_response(
            {
                "version": app.version,
                "models": [*service.names, *facts.adapters],
                "max_model_len": facts.max_tokens,
                "block_size": facts.block_size,
                "num_blocks": service.engine.last_numbers.num_blocks,
                "vocabulary_size": facts.vocabulary_size,
                "engine": facts.choices,
            }
        )

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Drop every cached block, so that later requests hit none; requests under way keep theirs."""
        require_administrator(request, "resetting the cache needs")
        await service.engine.reset_prefix_cache()
        return json_response({"success": True})

    _add_sleeping(app, service, require_administrator)


def _add_sleeping(app: FastAPI, service: Service, require_administrator: Callable[[Request, str], None]) -> None:
    @app.post("/sleep")
    async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
        """Refuse requests from now on, and give the memory of blocks back: with level 0 that stays."""
        require_administrator(request, "putting the server to sleep needs")
        if level not in {"0", "1"}:
            raise ApiError(
                400, "level must be 0, to pause, or 1, to give the memory of blocks back: weights stay", param="level"
            )
        if mode not in {"abort", "wait"}:
            raise ApiError(400, "mode must be abort or wait: no request is kept while the server sleeps", param="mode")
        released = await service.sleep(waits=mode == "wait", gives_memory_back=level == "1")
        return json_response({"status": "sleeping", "level": int(level), "released_bytes": released})

    @app.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Take the memory of blocks again, and requests; with ``tags`` of weights alone nothing changes."""
        require_administrator(request, "waking the server needs")
        tags = request.query_params.getlist("tags")
        unknown = sorted({*tags} - TAGS)
        if unknown:
            raise ApiError(400, f"tags must be of {', '.join(sorted(TAGS))}, got {unknown[0][:50]!r}", param="tags")
        if not tags or BLOCKS_TAG in tags:
            await service.wake()
        return json_response({"status": "sleeping" if service.is_asleep else "awake", "tags": tags or None})

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> Response:
        """Answer whether the server sleeps."""
        require_administrator(request, "information about the server needs")
        return json_response({"is_sleeping": service.is_asleep})
