"""Snapshot: the inspector's view of an engine or a replay between two steps, copied by the thread that runs them.

Beside it the tree of cached prefixes, with bounded depth and number of nodes; the largest prefixes come first. A node
is a run of blocks, each the only child of the one before it::

    blocks a - b - c -+- d - e            node (a b c), with two children (d e) and (f)
                      `- f

A node's size counts all blocks in its run and after it; its hits count those that ended in its run or after it.

As JSON, a watcher's first event has the whole snapshot, later ones have the changes. Arrays of blocks are base64: a
byte a block, with the state in the three lowest bits and the tenant's number, at most 31, above them; ids of changed
blocks are little-endian int32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Any, Final, final

import numpy as np

from pagedkv.contract.answers import ORDER, Explanation
from pagedkv.contract.arrays import Float64Array, Int32Array, Int64Array, Uint8Array
from pagedkv.server.inspector.history import (
    REQUEST_FIELDS,
    STATES,
    STEP_FIELDS,
    History,
    InspectedRequest,
    ReplayState,
    Subject,
    as_buckets,
)
from pagedkv.space import BlockState, CachedPrefixes, PoolCounts, PoolMap, SpaceInspection
from pagedkv.tiers.served import LoadUnderWay, TierStatistics

MOST_REQUESTS: Final = 200
MOST_ENDED: Final = 30
RECENT: Final = 3
"""Units of time whose steps are in a snapshot. A watcher that missed earlier steps reads the history."""
MOST_NODES: Final = 200
MOST_DEPTH: Final = 16
NONE: Final = -1


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A request that waits or runs.

    Args:
        number: its number.
        tenant: its tenant.
        state: "waiting", "running" or "preempted".
        num_prompt_tokens: tokens of its prompt.
        num_hit_tokens: prompt tokens that hit; None before its first admission.
        explanation: why its hit ended there; None before its first admission, and for forks.
        num_generated: tokens generated of each answer.
        most_tokens: most tokens that it may generate.
        num_preemptions: how often it was preempted.
        age_s: seconds since its arrival.
        tier_notes: what became of what tiers had for it.
    """

    number: int
    tenant: str | None
    state: str
    num_prompt_tokens: int
    num_hit_tokens: int | None
    explanation: Explanation | None
    num_generated: int
    most_tokens: int
    num_preemptions: int
    age_s: float
    tier_notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """An engine or a replay between two steps.

    Args:
        version: grows with each snapshot.
        now_s: seconds since the history began; unit_s: seconds of a unit of time.
        last_step: numbers of the last step by name; None before the first one.
        tenants: names by number.
        maps, counts, shares: those of each device pool.
        steps, admissions: those of the last seconds, in the history's form.
        requests: the first requests under way.
        num_requests: number of all requests under way.
        ended: the ended ones among the latest requests.
        ended_tenants: names of their tenants, by number.
        ended_notes: of those for which tiers had something, what became of it, by the number of the request.
        tiers: the tiers.
        loads: the loads under way.
        replay: the state of a replay; None for an engine.
    """

    version: int
    now_s: float
    unit_s: float
    last_step: dict[str, float] | None
    tenants: tuple[str | None, ...]
    maps: tuple[PoolMap, ...]
    counts: tuple[PoolCounts, ...]
    shares: tuple[Int32Array, ...]
    steps: Float64Array
    admissions: Float64Array
    requests: Sequence[UnderWay]
    num_requests: int
    ended: Float64Array
    ended_tenants: tuple[str | None, ...]
    ended_notes: dict[int, tuple[str, ...]]
    tiers: tuple[TierStatistics, ...]
    loads: tuple[LoadUnderWay, ...]
    replay: ReplayState | None = None


def take_snapshot(
    version: int,
    subject: Subject,
    inspection: SpaceInspection,
    history: History,
    replay: ReplayState | None = None,
) -> Snapshot:
    """Take a snapshot, in the thread that runs the steps. O(blocks)."""
    history.note_now()
    now_s, unit_s = history.now_s, history.unit_s
    pools = inspection.pool_names
    begin_s = max(0.0, (now_s // unit_s - RECENT) * unit_s)
    last_step = history.last_step()
    return Snapshot(
        version=version,
        now_s=now_s,
        unit_s=unit_s,
        last_step=None if last_step is None else dict(zip(STEP_FIELDS, last_step.tolist(), strict=True)),
        tenants=inspection.tenant_names,
        maps=tuple(map(inspection.map, pools)),
        counts=tuple(map(inspection.counts, pools)),
        shares=tuple(map(inspection.shares, pools)),
        steps=history.steps(begin_s, inf),
        admissions=history.admissions(begin_s, inf),
        requests=[_under_way(request, history, now_s) for request in islice(subject.requests, MOST_REQUESTS)],
        num_requests=len(subject.requests),
        ended=history.ended(MOST_ENDED),
        ended_tenants=history.tenant_names,
        ended_notes=history.tier_notes(),
        tiers=subject.tier_statistics(),
        loads=subject.tier_loads(),
        replay=replay,
    )


def _under_way(request: InspectedRequest, history: History, now_s: float) -> UnderWay:
    has_begun = request.num_cached_tokens is not None
    return UnderWay(
        request.number,
        request.scheduled.intent.tenant,
        ("running" if request.scheduled.rows else "preempted") if has_begun else "waiting",
        request.scheduled.num_prompt_tokens,
        request.num_cached_tokens,
        request.explanation,
        request.scheduled.num_generated,
        request.scheduled.max_new_tokens,
        request.num_preemptions,
        now_s - history.arrived_s(request),
        tuple(map(str, request.tier_notes)),
    )


def as_tree(prefixes: CachedPrefixes, *, most_nodes: int = MOST_NODES, most_depth: int = MOST_DEPTH) -> dict[str, Any]:
    """Return the largest prefixes as nested nodes.

    Args:
        prefixes: the cached prefixes of one pool.
        most_nodes: most nodes of the tree.
        most_depth: most nodes from a root to a leaf.

    Returns:
        ``roots``, each with ``block`` (the first block's id), ``blocks`` and ``tokens`` of the run, ``all_blocks``,
        ``all_hits``, ``live`` (live blocks in the run and after it), ``tenant`` by number, ``group``, ``children``, and
        ``more``, the number of children that are left out. ``more_roots`` is the number of roots left out.

    Cost: O(blocks x log(longest chain)).
    """
    return _Tree(prefixes).grown(most_nodes, most_depth)


@final
class _Tree:
    """The chains of one pool, with sums over each block and all blocks after it."""

    def __init__(self, prefixes: CachedPrefixes) -> None:
        self._prefixes = prefixes
        parents = prefixes.parents
        self._sums = _behind(parents, np.stack([np.ones_like(parents), prefixes.num_hits, prefixes.is_live], axis=1))
        by_parent = np.argsort(parents, kind="stable")
        num_children = np.bincount(parents[parents >= 0], minlength=len(parents))
        num_roots = int((parents < 0).sum())
        self._roots = by_parent[:num_roots].tolist()
        self._children = by_parent[num_roots:].tolist()
        self._firsts = np.concatenate([[0], np.cumsum(num_children)]).tolist()

    def grown(self, most_nodes: int, most_depth: int) -> dict[str, Any]:
        """Take the largest nodes, each one after its parent."""
        top: dict[str, Any] = {"pool": self._prefixes.pool, "num_blocks": len(self._prefixes.parents), "children": []}
        heap: list[tuple[int, int, int]] = []
        owners: dict[int, dict[str, Any]] = {}

        def offer(places: list[int], owner: dict[str, Any], depth: int) -> None:
            owner["more"] = len(places)
            for place in places:
                owners[place] = owner
                heappush(heap, (-int(self._sums[place, 0]), place, depth))

        offer(self._roots, top, 1)
        for _ in range(most_nodes):
            if not heap:
                break
            _, place, depth = heappop(heap)
            owner = owners[place]
            node, last = self._node(place)
            owner["children"].append(node)
            owner["more"] -= 1
            if depth < most_depth:
                offer(self._children_of(last), node, depth + 1)
            else:
                node["more"] = len(self._children_of(last))
        return {"pool": top["pool"], "num_blocks": top["num_blocks"], "roots": top["children"], "more": top["more"]}

    def _children_of(self, place: int) -> list[int]:
        children: list[int] = self._children[self._firsts[place] : self._firsts[place + 1]]
        return children

    def _node(self, place: int) -> tuple[dict[str, Any], int]:
        """Return the node of the run that begins at a block, and the run's last block."""
        last, num_blocks = place, 1
        while len(children := self._children_of(last)) == 1:
            last, num_blocks = children[0], num_blocks + 1
        prefixes, (all_blocks, all_hits, num_live) = self._prefixes, self._sums[place].tolist()
        group = int(prefixes.groups[place])
        return {
            "block": int(prefixes.block_ids[place]),
            "last_block": int(prefixes.block_ids[last]),
            "blocks": num_blocks,
            "tokens": num_blocks * prefixes.block_sizes[group],
            "all_blocks": all_blocks,
            "all_hits": all_hits,
            "live": num_live,
            "tenant": int(prefixes.tenants[place]),
            "group": group,
            "children": [],
            "more": 0,
        }, last


def _behind(parents: Int32Array, values: Int32Array) -> Int64Array:
    """Sum values, int32 ``[n, any]``, over each block and all blocks after it."""
    sums = values.astype(np.int64)
    depths, ancestors = (parents >= 0).astype(np.int64), parents.copy()
    while (ancestors >= 0).any():  # each round doubles the distance to the ancestors
        has_ancestor = ancestors >= 0
        depths[has_ancestor] += depths[ancestors[has_ancestor]]
        ancestors[has_ancestor] = ancestors[ancestors[has_ancestor]]
    by_depth = np.argsort(-depths, kind="stable")
    by_depth = by_depth[: np.count_nonzero(depths)]  # first blocks have no parent
    bounds = np.flatnonzero(np.diff(depths[by_depth])) + 1
    for level in np.split(by_depth, bounds):
        np.add.at(sums, parents[level], sums[level])
    return sums


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
        "requests": [_answers_under_way(each, snapshot.tenants) for each in snapshot.requests],
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


def _answers_under_way(request: UnderWay, tenants: Sequence[str | None]) -> dict[str, Any]:
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
