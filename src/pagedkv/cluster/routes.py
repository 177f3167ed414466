"""A page of a cluster: its replicas, and the routing choice of each request with its reason.

``/inspect`` is the page, ``/inspect/routes`` its data as JSON. Where API keys exist, an administrator's key is needed:
the data has no prompts, but the number of cached tokens of each. If the replicas have an inspector, the page has a link
to each one's blocks.
"""

from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from pagedkv.cluster.placements import Placed, ReplicaStatus
from pagedkv.cluster.remote_inspection import add_replica_inspectors
from pagedkv.cluster.replicated_engine import ReplicatedEngine
from pagedkv.routing import Candidate
from pagedkv.server import ApiError, Service
from pagedkv.server.json_response import json_response
from pagedkv.server.static_pages import PAGE_HEADERS, add_page

__all__ = ["add_routes"]

MOST_SHOWN: Final = 200


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
