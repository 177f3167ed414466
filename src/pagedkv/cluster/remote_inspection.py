"""The inspector of one replica, in the front: the same page and paths as those of a single engine.

``/replicas/{name}/inspect`` is the page of a replica's blocks, and its data are below that path. The front asks the
replica, and checks keys itself.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, final

from fastapi import FastAPI, Request

from pagedkv.cluster.messages import ReplicaCall
from pagedkv.cluster.replicated_engine import ReplicatedEngine
from pagedkv.server import ApiError, Service
from pagedkv.server.inspector import LAST_EVENT, add_inspector_paths

__all__ = ["add_replica_inspectors"]

OK: Final = 200


def add_replica_inspectors(app: FastAPI, service: Service, engine: ReplicatedEngine) -> None:
    """Add the pages of all replicas' blocks to an application.

    Args:
        app: the application; service: its service; engine: the service's engine.
    """

    def replica_of(request: Request) -> tuple[_InspectedReplica, str]:
        name = request.path_params["replica"]
        return _InspectedReplica(engine, name), f"{service.config.model_name}, replica {name}"

    add_inspector_paths(app, service, "/replicas/{replica}/inspect", replica_of)


@final
class _InspectedReplica:
    """The data of a replica, as :class:`~pagedkv.server.inspector.Inspected` has them."""

    def __init__(self, engine: ReplicatedEngine, name: str) -> None:
        self._engine = engine
        self._name = name

    async def events(self, title: str, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield the replica's events, until it ends or ``is_over`` is true."""
        call = ReplicaCall(self._name, "events", {"title": title})
        async with aclosing(self._engine.watch_replica(call)) as events:
            async for each in events:
                if each == LAST_EVENT:
                    break
                yield each
                if is_over():
                    break
        yield LAST_EVENT

    async def block(self, pool: str, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Describe one block. Raises ApiError."""
        return await self._ask("block", pool=pool, block_id=block_id, tenant=tenant)

    async def prefixes(self, pool: str | None) -> dict[str, Any]:
        """Describe the largest cached prefixes. Raises ApiError."""
        return await self._ask("prefixes", pool=pool)

    async def history(self, from_s: float, to_s: float) -> dict[str, Any]:
        """Describe a span of time. Raises ApiError."""
        return await self._ask("history", from_s=from_s, to_s=to_s)

    async def _ask(self, what: str, **arguments: object) -> dict[str, Any]:
        answer = await self._engine.ask_replica(ReplicaCall(self._name, what, arguments))
        if answer.status != OK:
            raise ApiError(answer.status, answer.problem)
        return dict(answer.values)
