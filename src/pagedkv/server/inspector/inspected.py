"""InspectedEngine, InspectedReplay: what the inspector shows of one engine or of one replay, without keys and paths.

Its answers are plain values, so that a front of several engines can pass them on
(:mod:`pagedkv.cluster.routes`).

Watchers share snapshots, which are taken between two steps, and only while a watcher is connected. A snapshot is taken
at most four times a second, and less often where it takes long: snapshots take at most 1/60 of the time.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import msgspec
import numpy as np

from pagedkv.contract.arrays import Float64Array, Uint8Array
from pagedkv.engine import StepRecord
from pagedkv.errors import BlockError, ConfigurationError, EngineError
from pagedkv.server.engines import LocalEngine
from pagedkv.server.http import ApiError
from pagedkv.server.inspector.history import (
    MOST_TENANTS,
    STATES_OF_BLOCKS,
    BetweenSteps,
    History,
    InspectedRequest,
    ReplayState,
    Subject,
    as_buckets,
    width_for,
)
from pagedkv.server.inspector.snapshot import (
    Snapshot,
    as_byte_map,
    as_changes,
    as_ended,
    as_snapshot,
    as_tree,
    take_snapshot,
)
from pagedkv.server.service import event
from pagedkv.space import BlockDetails, CachedPrefixes, SpaceInspection

T = TypeVar("T")
MOST_SAMPLES: Final = 600
MOST_REQUESTS_OF_A_TIME: Final = 200
DIGITS_OF_DIGEST: Final = 16
LAST_EVENT: Final = event(b"{}", "end")


class Inspected(Protocol):
    """The data of one engine, in this process or in another one."""

    def events(self, title: str, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: a snapshot under a title, then changes; the last one when ``is_over`` is true."""
        ...

    async def block(self, pool: str, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Describe one block for a caller of a tenant. Raises ApiError."""
        ...

    async def prefixes(self, pool: str | None) -> dict[str, Any]:
        """Describe the largest cached prefixes of a pool; None: of the first. Raises ApiError."""
        ...

    async def history(self, from_s: float, to_s: float) -> dict[str, Any]:
        """Describe a span of time, in seconds since the engine began."""
        ...


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


class _LocallyInspected:
    """The data of an engine or a replay in this process: what both have in common.

    Args:
        watch, history, inspection: of the engine.
        decode: turns the tokens of a block into text; None: tokens and texts are not shown.
        shows_all: whether every caller may read the tokens of every tenant's blocks.
    """

    def __init__(
        self,
        watch: Watch,
        history: History,
        inspection: SpaceInspection,
        decode: Callable[[Sequence[int]], str] | None,
        *,
        shows_all: bool = False,
    ) -> None:
        self._shows_all = shows_all
        self._inspection = inspection
        self._history = history
        self._watch = watch
        self._decode = decode
        self._delta: tuple[int, int, bytes] = (0, 0, b"")

    def stepped(self, record: StepRecord) -> None:
        """Note a step. Called after each, in the thread that runs the steps."""
        self._history.note_step(record)

    async def events(self, title: str, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield events until ``is_over`` is true or the engine has ended."""
        try:
            snapshot = await self._watch.latest(0, is_over)
            first = as_snapshot(snapshot, title, has_texts=self._decode is not None)
            yield event(msgspec.json.encode(first), "snapshot")
            while not is_over():
                before, snapshot = snapshot, await self._watch.latest(snapshot.version, is_over)
                if snapshot is not before:
                    yield self._changes(before, snapshot)
        except EngineError:
            pass
        yield LAST_EVENT

    def _changes(self, before: Snapshot, now: Snapshot) -> bytes:
        """Write the event between two snapshots, once for all watchers that have the first one."""
        if self._delta[:2] != (before.version, now.version):
            changes = as_changes(now, [as_byte_map(each) for each in before.maps])
            self._delta = before.version, now.version, event(msgspec.json.encode(changes), "delta")
        return self._delta[2]

    async def block(self, pool: str, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Describe one block. Raises ApiError."""
        try:
            seen = await self._watch.block(pool, block_id)
        except (ConfigurationError, BlockError) as problem:
            raise ApiError(404, str(problem)) from problem
        answer = _as_block(seen)
        if self._decode is not None and self._may_read(tenant, seen.details.tenant):
            token_ids = seen.details.token_ids.tolist()
            answer |= {"token_ids": token_ids, "text": self._decode(token_ids)}
        return answer

    def _may_read(self, caller: str | None, tenant: str | None) -> bool:
        if self._shows_all:
            return True
        return caller == tenant if caller is not None else len(self._inspection.tenant_names) == 1

    async def prefixes(self, pool: str | None) -> dict[str, Any]:
        """Describe the largest cached prefixes of a pool; None: of the first. Raises ApiError."""
        try:
            prefixes = await self._watch.prefixes(self._inspection.pool_names[0] if pool is None else pool)
        except ConfigurationError as problem:
            raise ApiError(404, str(problem)) from problem
        return {**as_tree(prefixes), "tenants": [name or "" for name in self._inspection.tenant_names]}

    async def history(self, from_s: float, to_s: float) -> dict[str, Any]:
        """Describe a span of time, in seconds since the history began."""
        answer = await self._watch.history(from_s, to_s, MOST_REQUESTS_OF_A_TIME)
        now_s, unit_s = answer["now_s"], answer["unit_s"]
        first_s = float(answer["steps"][0, 0]) if len(answer["steps"]) else now_s
        samples = answer["samples"][:: max(1, math.ceil(len(answer["samples"]) / MOST_SAMPLES))]
        num_numbers = len(STATES_OF_BLOCKS) + 2 * MOST_TENANTS
        shape = len(samples), len(self._inspection.pool_names), num_numbers
        numbers = samples[:, 1:].reshape(shape).astype(int)
        by_tenant = numbers[:, :, len(STATES_OF_BLOCKS) :].reshape(*shape[:2], MOST_TENANTS, 2)
        return {
            "now_s": round(now_s, 3),
            "buckets": as_buckets(answer["steps"], answer["admissions"], width_for(min(to_s, now_s) - first_s, unit_s)),
            "block_states": STATES_OF_BLOCKS,
            "samples": {
                "time_s": samples[:, 0].round(3).tolist(),
                "pools": numbers[:, :, : len(STATES_OF_BLOCKS)].tolist(),
                "shares": by_tenant[:, :, : len(self._inspection.tenant_names)].tolist(),
            },
            "requests": as_ended(answer["requests"], answer["tenants"], answer["tier_notes"]),
        }


@final
class InspectedEngine(_LocallyInspected):
    """The data of an engine in this process. Make it before the engine is started.

    Args:
        engine: the engine.
        decode: turns the tokens of a block into text; None: tokens and texts are not shown.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        engine: LocalEngine,
        decode: Callable[[Sequence[int]], str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        core, inspection = engine.llm.core, SpaceInspection()
        core.space.observe(inspection)
        history = History(core, inspection, clock)
        core.on_entered.append(history.note_arrived)

        def between_steps(work: Callable[[], T]) -> Awaitable[T]:
            return engine.between_steps(lambda _: work())

        watch = Watch(core, between_steps, history=history, inspection=inspection, clock=clock)
        super().__init__(watch, history, inspection, decode)


@final
class InspectedReplay(_LocallyInspected):
    """The data of a replay in this process; its history is on the virtual clock. Make it before the first request.

    Args:
        subject: the replay.
        between_steps: runs work between its steps.
        virtual_clock: returns the seconds of the trace that have passed; they never decrease.
        state: returns the replay's state, between steps.
        unit_s: seconds of the trace over which plots sum up steps.
        shows_tokens: whether a block's tokens are shown, to everyone who may see the page.
    """

    def __init__(  # noqa: PLR0913 - parts of a replay, by keywords
        self,
        subject: Subject,
        between_steps: BetweenSteps,
        *,
        virtual_clock: Callable[[], float],
        state: Callable[[], ReplayState],
        unit_s: float = 1,
        shows_tokens: bool = False,
    ) -> None:
        inspection = SpaceInspection()
        subject.space.observe(inspection)
        history = History(subject, inspection, virtual_clock, unit_s=unit_s)
        watch = Watch(
            subject, between_steps, history=history, inspection=inspection, clock=time.perf_counter, replay=state
        )
        super().__init__(watch, history, inspection, _no_text if shows_tokens else None, shows_all=True)

    def arrived(self, request: InspectedRequest, arrived_s: float) -> None:
        """Note a request. Called in the thread that runs the steps, like :meth:`widen`."""
        self._history.note_arrived(request, arrived_s)

    def widen(self, unit_s: float) -> None:
        """Let plots sum up steps over so many seconds from now on."""
        self._history.unit_s = unit_s


def _no_text(token_ids: Sequence[int]) -> str:  # noqa: ARG001 - as a tokenizer's
    """Return nothing: a trace has no tokenizer."""
    return ""


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


PERIOD_S: Final = 0.25
REST_PER_WORK: Final = 60
FORGET_AFTER_S: Final = 10.0
