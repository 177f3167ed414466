"""Snapshots as JSON: a watcher's first event has the whole snapshot, later ones have the changes.

Arrays of blocks are base64: a byte a block, with the state in the three lowest bits and the tenant's number, at most
31, above them; ids of changed blocks are little-endian int32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from pagedkv.contract.answers import ORDER
from pagedkv.contract.arrays import Float64Array, Uint8Array
from pagedkv.server.inspector.history import REQUEST_FIELDS, STATES, as_buckets
from pagedkv.server.inspector.snapshot import Snapshot, UnderWay
from pagedkv.server.inspector.subject import ReplayState
from pagedkv.space import BlockState, PoolCounts, PoolMap
from pagedkv.tiers.served import TierStatistics

__all__ = ["as_byte_map", "as_changes", "as_ended", "as_snapshot"]

TENANT_SHIFT: Final = 3
MOST_TENANT: Final = 31
SHARE_SENT_WHOLE: Final = 4
"""A map is sent whole where more than one in this number of its blocks has changed."""


def as_byte_map(pool_map: PoolMap) -> Uint8Array:
    """Return a byte a block: uint8 ``[num_blocks]``."""
    tenants = np.minimum(pool_map.tenants, MOST_TENANT).astype(np.uint8)
    return (pool_map.states | (tenants << TENANT_SHIFT)).astype(np.uint8)


def as_snapshot(snapshot: Snapshot, model: str, *, has_texts: bool) -> dict[str, Any]:
    """Return a watcher's first event."""
    return {
        **_common(snapshot),
        "model": model,
        "has_texts": has_texts,
        "block_states": [state.name.lower() for state in BlockState],
        "causes": [cause.value for cause in ORDER],
        "pools": [
            {"name": each.pool, "num_blocks": len(each.states), "map": as_byte_map(each).tobytes(), **_counts(counts)}
            for each, counts in zip(snapshot.maps, snapshot.counts, strict=True)
        ],
        "shares": _shares(snapshot),
    }


def as_changes(snapshot: Snapshot, before: Sequence[Uint8Array]) -> dict[str, Any]:
    """Return the changes since the maps that a watcher has."""
    pools = []
    for each, counts, known in zip(snapshot.maps, snapshot.counts, before, strict=True):
        now = as_byte_map(each)
        ids = np.flatnonzero(now != known)
        if len(ids) * SHARE_SENT_WHOLE > len(now):
            change = {"map": now.tobytes()}
        else:
            change = {"ids": ids.astype("<i4").tobytes(), "values": now[ids].tobytes()}
        pools.append({"name": each.pool, **change, **_counts(counts)})
    return {**_common(snapshot), "pools": pools, "shares": _shares(snapshot)}


def _common(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "version": snapshot.version,
        "now_s": round(snapshot.now_s, 3),
        "unit_s": snapshot.unit_s,
        "replay": None if snapshot.replay is None else _replay(snapshot.replay),
        "step": snapshot.last_step,
        "tenants": [name or "" for name in snapshot.tenants],
        "buckets": as_buckets(snapshot.steps, snapshot.admissions, snapshot.unit_s),
        "requests": [_under_way(each, snapshot.tenants) for each in snapshot.requests],
        "num_requests": snapshot.num_requests,
        "ended": as_ended(snapshot.ended, snapshot.ended_tenants, snapshot.ended_notes),
        "tiers": [_tier(each) for each in snapshot.tiers],
        "loads": [
            {"tier": each.tier, "start": each.start, "end": each.end, "requests": each.num_requests}
            for each in snapshot.loads
        ],
    }


def _replay(replay: ReplayState) -> dict[str, Any]:
    return {
        "speed": replay.speed,
        "is_paused": replay.is_paused,
        "is_over": replay.is_over,
        "requests": replay.num_requests,
        "finished": replay.num_finished,
        "rejected": replay.num_rejected,
        "prompt": replay.num_prompt_tokens,
        "hit": replay.num_hit_tokens,
        "missed": [[each.cause, each.num_tokens] for each in replay.missed],
    }


def _tier(tier: TierStatistics) -> dict[str, Any]:
    store = tier.store
    return {
        "name": tier.name,
        "state": str(store.breaker),
        "entries": store.num_entries,
        "nbytes": store.nbytes,
        "cap_nbytes": store.cap_nbytes,
        "reads": store.num_reads,
        "queued": store.num_queued + store.num_writes,
        "loaded_tokens": tier.num_loaded_tokens,
        "hit_tokens": tier.num_hit_tokens,
        "not_loaded": {str(cause): num_tokens for cause, num_tokens in tier.not_loaded.items()},
        "evicted": store.num_evicted,
    }


def _counts(counts: PoolCounts) -> dict[str, Any]:
    return {
        "counts": {
            "free": counts.num_free,
            "cached": counts.num_cached,
            "leased": counts.num_leased,
            "live": counts.num_live,
            "deferred": counts.num_deferred,
        }
    }


def _shares(snapshot: Snapshot) -> list[list[list[int]]]:
    return [shares.tolist() for shares in snapshot.shares]


def _under_way(request: UnderWay, tenants: Sequence[str | None]) -> dict[str, Any]:
    return {
        "number": request.number,
        "tenant": request.tenant if request.tenant in tenants else None,
        "state": request.state,
        "prompt": request.num_prompt_tokens,
        "hit": request.num_hit_tokens,
        "cause": None if request.explanation is None else request.explanation.cause.value,
        "position": None if request.explanation is None else request.explanation.position,
        "group": None if request.explanation is None else request.explanation.group,
        "lost_blocks_ago": None if request.explanation is None else request.explanation.age,
        "generated": request.num_generated,
        "most": request.most_tokens,
        "preemptions": request.num_preemptions,
        "age_s": round(request.age_s, 3),
        "tiers": request.tier_notes,
    }


def as_ended(
    rows: Float64Array, tenants: Sequence[str | None], tier_notes: Mapping[int, tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Return requests of the history, the latest first."""
    return [_ended(dict(zip(REQUEST_FIELDS, row, strict=True)), tenants, tier_notes) for row in reversed(rows.tolist())]


def _ended(
    row: dict[str, float], tenants: Sequence[str | None], tier_notes: Mapping[int, tuple[str, ...]]
) -> dict[str, Any]:
    has_ended, was_admitted = row["ended_s"] >= 0, row["admitted_s"] >= 0
    tenant, cause = int(row["tenant"]), int(row["cause"])
    return {
        "number": int(row["number"]),
        "tenant": tenants[tenant],
        "state": STATES[int(row["state"])],
        "prompt": int(row["prompt"]),
        "hit": int(row["hit"]) if was_admitted else None,
        "cause": ORDER[cause].value if cause >= 0 else None,
        "position": int(row["position"]) if cause >= 0 else None,
        "group": int(row["group"]) if row["group"] >= 0 else None,
        "generated": int(row["generated"]),
        "preemptions": int(row["preemptions"]),
        "arrived_s": round(row["arrived_s"], 3),
        "admitted_s": round(row["admitted_s"], 3) if was_admitted else None,
        "ended_s": round(row["ended_s"], 3) if has_ended else None,
        "tiers": tier_notes.get(int(row["number"]), ()),
    }
