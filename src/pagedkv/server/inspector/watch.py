"""Watch: snapshots that all watchers share, taken between two steps, and only while a watcher is connected.

A snapshot is taken at most four times a second, and less often where it takes long: snapshots take at most 1/60 of the
time.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from pagedkv.contract.arrays import Float64Array, Uint8Array
from pagedkv.server.inspector.history import History
from pagedkv.server.inspector.messages import as_byte_map
from pagedkv.server.inspector.snapshot import Snapshot, take_snapshot
from pagedkv.server.inspector.subject import BetweenSteps, ReplayState, Subject
from pagedkv.space import BlockDetails, CachedPrefixes, SpaceInspection

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
    """Takes snapshots of an engine or a replay for watchers of one event loop.

    Args:
        subject: the engine, or the replay.
        between_steps: runs work between its steps.
        history: records its steps.
        inspection: the inspection of its block space.
        clock: returns monotonic seconds of this machine; those of the history may be others.
        replay: returns the state of a replay; None: an engine.
    """

    def __init__(  # noqa: PLR0913 - what is watched, and how, by keywords
        self,
        subject: Subject,
        between_steps: BetweenSteps,
        *,
        history: History,
        inspection: SpaceInspection,
        clock: Callable[[], float],
        replay: Callable[[], ReplayState] | None = None,
    ) -> None:
        self._subject = subject
        self._between_steps = between_steps
        self._replay = replay
        self._history = history
        self._inspection = inspection
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest: Snapshot | None = None
        self._byte_maps: tuple[Uint8Array, ...] = ()
        self._changed_s: tuple[Float64Array, ...] = ()
        self._watched_since_s = 0.0
        self._latest_at = -np.inf
        self._next_at = -np.inf

    async def latest(self, after: int, is_over: Callable[[], bool]) -> Snapshot:
        """Return a snapshot with a number above ``after``, no older than the period of snapshots.

        Wait until one may be taken, or ``is_over`` is true, which is asked once a period: then return the last one.
        Raises EngineError where the engine has ended.
        """
        async with self._lock:
            if self._latest is None or self._latest.version <= after or self._clock() >= self._next_at:
                while not is_over() and (left_s := self._next_at - self._clock()) > 0:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(min(left_s, PERIOD_S))
                if self._latest is None or not is_over():
                    self._note(await self._take())
            assert self._latest is not None
            return self._latest

    async def _take(self) -> Snapshot:
        version = 1 if self._latest is None else self._latest.version + 1
        cost_s = 0.0

        def work() -> Snapshot:
            nonlocal cost_s
            began = self._clock()
            replay = None if self._replay is None else self._replay()
            snapshot = take_snapshot(version, self._subject, self._inspection, self._history, replay)
            cost_s = self._clock() - began
            return snapshot

        snapshot = await self._between_steps(work)
        self._next_at = self._clock() + max(PERIOD_S, REST_PER_WORK * cost_s)
        return snapshot

    def _note(self, snapshot: Snapshot) -> None:
        """Keep a snapshot, and the time at which each block last changed."""
        byte_maps = tuple(map(as_byte_map, snapshot.maps))
        before = self._latest
        seen_at = self._clock()
        if before is None or seen_at - self._latest_at > FORGET_AFTER_S:
            self._watched_since_s = snapshot.now_s
            self._changed_s = tuple(np.full(len(each), snapshot.now_s) for each in byte_maps)
        else:
            for known, now, changed_s in zip(self._byte_maps, byte_maps, self._changed_s, strict=True):
                changed_s[known != now] = snapshot.now_s
        self._latest, self._byte_maps, self._latest_at = snapshot, byte_maps, seen_at

    async def block(self, pool: str, block_id: int) -> SeenBlock:
        """Return everything about one block. Raises ConfigurationError, BlockError, EngineError."""

        def work() -> tuple[BlockDetails, list[Holder], float, float]:
            details = self._inspection.block(pool, block_id)
            rows = set(details.rows)
            holders = [
                Holder(request.number, request.scheduled.intent.tenant)
                for request in (self._subject.requests if rows else ())
                if not rows.isdisjoint(request.scheduled.rows)
            ]
            return details, holders, self._subject.space.now_s, self._history.now_s

        details, holders, space_now_s, now_s = await self._between_steps(work)
        lease_s = None if details.lease_end_s is None else max(0.0, details.lease_end_s - space_now_s)
        changed_s = self._changed_at(pool, block_id)
        return SeenBlock(
            details,
            holders,
            lease_s,
            None if changed_s is None else now_s - changed_s,
            is_longer=changed_s == self._watched_since_s,
        )

    def _changed_at(self, pool: str, block_id: int) -> float | None:
        if self._latest is None or self._clock() - self._latest_at > FORGET_AFTER_S:
            return None
        place = [each.pool for each in self._latest.maps].index(pool)
        return float(self._changed_s[place][block_id])

    async def prefixes(self, pool: str) -> CachedPrefixes:
        """Copy the chains of cached blocks. Raises ConfigurationError, EngineError."""
        return await self._between_steps(lambda: self._inspection.prefixes(pool))

    async def history(self, from_s: float, to_s: float, most_requests: int) -> dict[str, Any]:
        """Copy the records of a span of time, in seconds of the history.

        Its keys are ``now_s``, ``unit_s``, ``steps``, ``admissions``, ``samples``, ``requests``, and for these
        ``tenants`` and ``tier_notes``.

        Raises EngineError.
        """

        def work() -> dict[str, Any]:
            history = self._history
            history.note_now()
            return {
                "now_s": history.now_s,
                "unit_s": history.unit_s,
                "steps": history.steps(from_s, to_s),
                "admissions": history.admissions(from_s, to_s),
                "samples": history.samples(from_s, to_s),
                "requests": history.requests(from_s, to_s, most_requests),
                "tenants": history.tenant_names,
                "tier_notes": history.tier_notes(),
            }

        return await self._between_steps(work)
