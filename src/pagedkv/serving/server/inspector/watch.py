"""Watch: snapshots that all watchers share, taken between two steps, and only while a watcher is connected.

A snapshot is taken at most four times a second, and less often where it takes long: snapshots take at most 1/60 of the
time.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from pagedkv.memory.contract.arrays import Float64Array, Uint8Array
from pagedkv.memory.space import BlockDetails, CachedPrefixes, SpaceInspection
from pagedkv.serving.engine import LLM
from pagedkv.serving.server.engines import LocalEngine
from pagedkv.serving.server.inspector.history import History
from pagedkv.serving.server.inspector.messages import as_byte_map
from pagedkv.serving.server.inspector.snapshot import Snapshot, take_snapshot

__all__ = ["Holder", "SeenBlock", "Watch"]

PERIOD_S: Final = 0.25
REST_PER_WORK: Final = 60
FORGET_AFTER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Holder:
    """A request that has a block in its table."""

    number: int
    tenant: str | None


@dataclass(frozen=True, slots=True, eq=False)
class SeenBlock:
    """A block and its recent history.

    Args:
        details: the block now.
        holders: requests that have it in their tables.
        lease_s: seconds until its lease ends; inf for high priority; None without a lease.
        unchanged_s: seconds since its state or tenant last changed; None where no watcher was connected.
        is_longer: whether the true time may be longer, because no watcher saw the change.
    """

    details: BlockDetails
    holders: Sequence[Holder]
    lease_s: float | None
    unchanged_s: float | None
    is_longer: bool


@final
class Watch:
    """Takes snapshots of an engine for watchers of one event loop.

    Args:
        engine: the engine, started before the first snapshot.
        history: records the engine's steps.
        inspection: the inspection of the engine's block space.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, engine: LocalEngine, history: History, inspection: SpaceInspection, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._history = history
        self._inspection = inspection
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest: Snapshot | None = None
        self._byte_maps: tuple[Uint8Array, ...] = ()
        self._changed_s: tuple[Float64Array, ...] = ()
        self._watched_since_s = 0.0
        self._next_at = -np.inf

    async def latest(self, after: int) -> Snapshot:
        """Return a snapshot with a number above ``after``, no older than the period of snapshots.

        Wait until one may be taken. Raises EngineError where the engine has ended.
        """
        async with self._lock:
            if self._latest is None or self._latest.version <= after or self._clock() >= self._next_at:
                await asyncio.sleep(max(0.0, self._next_at - self._clock()))
                self._note(await self._take())
            assert self._latest is not None
            return self._latest

    async def _take(self) -> Snapshot:
        version = 1 if self._latest is None else self._latest.version + 1
        cost_s = 0.0

        def work(llm: LLM) -> Snapshot:
            nonlocal cost_s
            began = self._clock()
            snapshot = take_snapshot(version, llm.core, self._inspection, self._history)
            cost_s = self._clock() - began
            return snapshot

        snapshot = await self._engine.between_steps(work)
        self._next_at = self._clock() + max(PERIOD_S, REST_PER_WORK * cost_s)
        return snapshot

    def _note(self, snapshot: Snapshot) -> None:
        """Keep a snapshot, and the time at which each block last changed."""
        byte_maps = tuple(map(as_byte_map, snapshot.maps))
        before = self._latest
        if before is None or snapshot.now_s - before.now_s > FORGET_AFTER_S:
            self._watched_since_s = snapshot.now_s
            self._changed_s = tuple(np.full(len(each), snapshot.now_s) for each in byte_maps)
        else:
            for known, now, changed_s in zip(self._byte_maps, byte_maps, self._changed_s, strict=True):
                changed_s[known != now] = snapshot.now_s
        self._latest, self._byte_maps = snapshot, byte_maps

    async def block(self, pool: str, block_id: int) -> SeenBlock:
        """Return everything about one block. Raises ConfigurationError, BlockError, EngineError."""

        def work(llm: LLM) -> tuple[BlockDetails, list[Holder], float, float]:
            details = self._inspection.block(pool, block_id)
            rows = set(details.rows)
            holders = [
                Holder(request.number, request.intent.tenant)
                for request in (llm.core.requests if rows else ())
                if not rows.isdisjoint(request.scheduled.rows)
            ]
            return details, holders, llm.core.space.now_s, self._history.now_s

        details, holders, space_now_s, now_s = await self._engine.between_steps(work)
        lease_s = None if details.lease_end_s is None else max(0.0, details.lease_end_s - space_now_s)
        changed_s = self._changed_at(pool, block_id, now_s)
        return SeenBlock(
            details,
            holders,
            lease_s,
            None if changed_s is None else now_s - changed_s,
            is_longer=changed_s == self._watched_since_s,
        )

    def _changed_at(self, pool: str, block_id: int, now_s: float) -> float | None:
        if self._latest is None or now_s - self._latest.now_s > FORGET_AFTER_S:
            return None
        place = [each.pool for each in self._latest.maps].index(pool)
        return float(self._changed_s[place][block_id])

    async def prefixes(self, pool: str) -> CachedPrefixes:
        """Copy the chains of cached blocks. Raises ConfigurationError, EngineError."""
        return await self._engine.between_steps(lambda _: self._inspection.prefixes(pool))

    async def history(self, from_s: float, to_s: float, most_requests: int) -> dict[str, Any]:
        """Copy the records of a span of time, in seconds of the history.

        Its keys are ``now_s``, ``steps``, ``admissions``, ``samples``, ``requests``, and for these ``tenants`` and
        ``tier_notes``.

        Raises EngineError.
        """

        def work(llm: LLM) -> dict[str, Any]:  # noqa: ARG001 - the engine's thread alone reads the history
            history = self._history
            history.note_now()
            return {
                "now_s": history.now_s,
                "steps": history.steps(from_s, to_s),
                "admissions": history.admissions(from_s, to_s),
                "samples": history.samples(from_s, to_s),
                "requests": history.requests(from_s, to_s, most_requests),
                "tenants": history.tenant_names,
                "tier_notes": history.tier_notes(),
            }

        return await self._engine.between_steps(work)
