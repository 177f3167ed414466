"""The pages of a cluster: its replicas, the routing choice of each request with its reason, and each replica's blocks.

``/inspect`` is the page, ``/inspect/routes`` its data as JSON. Where API keys exist, an administrator's key is needed:
the data has no prompts, but the number of cached tokens of each.

If the replicas have an inspector, ``/replicas/{name}/inspect`` is the page of a replica's blocks, and its data are
below that path, as those of a single engine. The front asks the replica, and checks keys itself.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, final

from fastapi import FastAPI, Request
from starlette.responses import Response

from pagedkv.cluster.messages import ReplicaCall
from pagedkv.cluster.placements import Placed, ReplicaStatus
from pagedkv.cluster.replicated_engine import ReplicatedEngine
from pagedkv.routing import Candidate
from pagedkv.server import ApiError, Service
from pagedkv.server.http import json_response
from pagedkv.server.inspector import LAST_EVENT, add_inspector_paths
from pagedkv.server.inspector.pages import PAGE_HEADERS, add_page

OK: Final = 200

MOST_SHOWN: Final = 200


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


def add_routes(app: FastAPI, service: Service, engine: ReplicatedEngine) -> None:
    """Add the page and its data to an application.

    Args:
        app: the application.
        service: the application's service.
        engine: the service's engine.
    """
    add_page(app, service.access, "/inspect", __package__, "routes")
    if engine.has_inspector:
        add_replica_inspectors(app, service, engine)

    @app.get("/inspect/routes", include_in_schema=False)
    async def routes(request: Request) -> Response:
        if not service.access.identify(request.headers).is_admin:
            raise ApiError(403, "the page of replicas needs an administrator's key")
        await engine.connect()
        return json_response(_routes(service, engine), headers=PAGE_HEADERS)


def _routes(service: Service, engine: ReplicatedEngine) -> dict[str, Any]:
    placements = engine.placements
    head: dict[str, Any] = {"model": service.config.model_name, "now_s": service.wall_clock()}
    if placements is None:  # the router has no replica yet
        return {**head, "replicas": [], "reasons": {}, "num_moved": 0, "choices": []}
    return {
        **head,
        "replicas": [_replica(each) for each in placements.replicas()],
        "reasons": placements.num_by_reason(),
        "num_moved": placements.num_moved,
        "choices": [_choice(each) for each in placements.latest(MOST_SHOWN)],
    }


def _replica(status: ReplicaStatus) -> dict[str, Any]:
    view = status.view
    return {
        "name": status.name,
        "process": status.facts.process,
        "has_inspector": status.facts.is_inspected,
        "node": status.facts.node,
        "lifetime": view.lifetime,
        "kv_events": status.facts.events,
        "kv_events_replay": status.facts.replays,
        "state": str(view.state),
        "is_silent": status.is_silent,
        "num_cached_blocks": view.num_blocks,
        "num_tier_entries": dict(view.num_tier_entries),
        "num_lost_batches": view.num_lost_batches,
        "num_prefill_tokens": status.num_prefill_tokens,
        "num_decoding": status.num_decoding,
        "numbers": {name: value for name, value in status.numbers.items() if name != "tiers"},
    }


def _choice(placed: Placed) -> dict[str, Any]:
    choice = placed.choice
    return {
        "request": placed.number,
        "attempt": placed.attempt,
        "at_s": round(placed.placed_s, 3),
        "replica": choice.replica,
        "reason": str(choice.reason),
        "num_prompt_tokens": choice.num_prompt_tokens,
        "num_answered_tokens": placed.num_answered,
        "candidates": [_candidate(each) for each in choice.candidates],
        "passed_over": [{"replica": name, "reason": reason} for name, reason in choice.passed_over],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "replica": candidate.name,
        "state": str(candidate.state),
        "num_hit_tokens": candidate.num_hit_tokens,
        "tier_tokens": dict(candidate.tier_tokens),
        "num_promised_tokens": candidate.num_promised_tokens,
        "num_prefill_tokens": candidate.num_prefill_tokens,
        "num_decoding": candidate.num_decoding,
        "recent_tokens": round(candidate.recent_tokens),
        "cost": round(candidate.cost),
        "is_over_share": candidate.is_over_share,
    }
