"""Snapshot: the inspector's view of an engine or a replay between two steps, copied by the thread that runs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Final

from pagedkv.contract.arrays import Float64Array, Int32Array
from pagedkv.contract.miss_causes import Explanation
from pagedkv.server.inspector.history import STEP_FIELDS, History
from pagedkv.server.inspector.subject import InspectedRequest, ReplayState, Subject
from pagedkv.space import PoolCounts, PoolMap, SpaceInspection
from pagedkv.tiers.served import LoadUnderWay, TierStatistics

__all__ = ["MOST_REQUESTS", "Snapshot", "UnderWay", "take_snapshot"]

MOST_REQUESTS: Final = 200
MOST_ENDED: Final = 30
RECENT: Final = 3
"""Units of time whose steps are in a snapshot. A watcher that missed earlier steps reads the history."""


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
