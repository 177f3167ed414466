"""What the inspector looks at, an engine or a replay, and its last minutes.

A replay is an engine without a model. Both have requests that one scheduler runs, and a block space.
:class:`~pagedkv.engine.EngineCore` and :class:`~pagedkv.engine.EngineRequest` have these attributes.

History keeps the steps and requests of the last minutes, in rings of fixed size; Buckets are their sums, for plots. The
thread that runs the steps writes and reads it, between steps only, so there are no locks. A step costs one row of
numbers; requests cost something only in steps that admit or end some; pools and tenants are sampled twice a unit of
time, which is a second for an engine. ::

    steps      131,072 rows x 22 x 8 bytes   22 MiB   2 minutes at 1 ms a step, 21 at 10 ms
    requests    65,536 rows x 14 x 8          7 MiB
    admissions 131,072 rows x 4 x 8           4 MiB
    samples      4,096 rows of 0.5 units      2.2 MiB a pool; fewer rows where there are more than 7 pools
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np

from pagedkv.contract.answers import Explanation, number_of
from pagedkv.contract.arrays import Float64Array
from pagedkv.engine import StepRecord
from pagedkv.scheduling import Request
from pagedkv.space import BlockSpace, SpaceInspection
from pagedkv.tiers.served import LoadUnderWay, TierNote, TierStatistics

T = TypeVar("T")


class InspectedRequest(Protocol):
    """A request from its arrival to its end."""

    @property
    def number(self) -> int:
        """Its number, which no other request has."""
        ...

    @property
    def scheduled(self) -> Request:
        """The scheduler's record of it."""
        ...

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of its prompt that hit at its first admission; None before it."""
        ...

    @property
    def explanation(self) -> Explanation | None:
        """Why no more of them hit; None before its first admission, and for forks."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        ...

    @property
    def tier_notes(self) -> Sequence[TierNote]:
        """What became of what tiers had for it."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, one of ``history.STATES``; None before its end."""
        ...

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated for all its answers."""
        ...


class Subject(Protocol):
    """An engine, or a replay."""

    @property
    def requests(self) -> Collection[InspectedRequest]:
        """Requests that wait or run, in the order of arrival."""
        ...

    @property
    def space(self) -> BlockSpace:
        """The block space."""
        ...

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        ...

    def tier_loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads from tiers that are under way."""
        ...


class BetweenSteps(Protocol):
    """Runs work of an event loop in the thread that runs the steps, between two of them."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run work there, and return what it returned. Raises EngineError where no step will follow."""
        ...


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Prompt tokens that did not hit.

    Args:
        cause: a kind of causes, in the report's words.
        num_tokens: how many.
    """

    cause: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReplayState:
    """A replay at one moment; the counts are those of its report.

    Args:
        speed: seconds of the trace for each second of this machine; None: as many as it can.
        is_paused: whether its time stands still.
        is_over: whether all requests have been served.
        num_requests, num_finished, num_rejected: requests that have arrived, that were served, and that cannot be.
        num_prompt_tokens, num_hit_tokens: of requests at their first admission.
        missed: their tokens that did not hit, by kind of cause.
    """

    speed: float | None
    is_paused: bool
    is_over: bool
    num_requests: int
    num_finished: int
    num_rejected: int
    num_prompt_tokens: int
    num_hit_tokens: int
    missed: tuple[MissedTokens, ...]


MOST_BUCKETS: Final = 600
SUMMED: Final = (
    *("decoded", "prefilled", "hit", "admitted", "swapped_out", "recomputed", "finished"),
    *("schedule_s", "forward_s", "sample_s", "finish_s"),
)
LASTING: Final = ("running", "waiting", "swapped", "used_blocks")
"""Columns whose last value in the bucket counts."""
STEP_FIELDS: Final = (
    *("time_s", "step_id", "decoded", "prefilled", "sampled", "admitted", "resumed", "swapped_out", "recomputed"),
    *("finished", "rejected", "hit", "running", "waiting", "swapped", "used_blocks", "schedule_s", "forward_s"),
    *("sample_s", "finish_s", "drafted", "accepted"),
)
"""Columns of the steps: numbers of :class:`StepRecord`, after the time at which the step was recorded."""
REQUEST_FIELDS: Final = (
    *("number", "tenant", "state", "prompt", "hit", "cause", "position", "group", "generated", "preemptions"),
    *("arrived_s", "admitted_s", "ended_s", "priority"),
)
"""Columns of the requests. Times are in seconds since the history began; -1: none yet."""
ADMISSION_FIELDS: Final = ("time_s", "cause", "hit", "missed")
"""Columns of the admissions: tokens of a prompt that hit, and that missed for one cause; its number is -1 without one.
A prompt whose tokens missed for several causes has a row for each; the first has its hit.
"""
STATES: Final = ("waiting", "running", "preempted", "stop", "length", "aborted", "rejected", "deadline", "failed")
"""States of a request by number; those after "preempted" are reasons for its end."""
STATES_OF_BLOCKS: Final = ("free", "cached", "leased", "live", "deferred")
MOST_TENANTS: Final = 32
"""Tenants with numbers of their own in a sample; the last one's numbers include those of all further tenants."""
MOST_NOTED: Final = 500
"""The last requests whose notes of tiers are kept. Those of a request are a few lines."""
SAMPLES_A_UNIT: Final = 2
MOST_SAMPLES_NBYTES: Final = 16 * 2**20
NUMBER, TENANT, STATE, PROMPT, HIT, CAUSE, POSITION, GROUP, GENERATED, PREEMPTIONS, ARRIVED, ADMITTED, ENDED, _ = range(
    len(REQUEST_FIELDS)
)
NONE: Final = -1


@final
class Ring:
    """Rows of float64, which hold counts exactly up to 2**53.

    Args:
        num_rows: rows that are kept.
        num_columns: numbers of a row. If rows are looked up by time, the first number is the time and never decreases.

    Attributes:
        num_written: rows written so far, including overwritten ones.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._rows: Float64Array = np.zeros((num_rows, num_columns))
        self.num_written = 0

    def __len__(self) -> int:
        """Number of rows that are kept now."""
        return min(self.num_written, len(self._rows))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, written or not."""
        return self._rows.nbytes

    def append(self, row: Sequence[float] | Float64Array) -> int:
        """Write a row; return its number, for :meth:`row`. O(columns)."""
        number = self.num_written
        self._rows[number % len(self._rows)] = row
        self.num_written = number + 1
        return number

    def row(self, number: int) -> Float64Array | None:
        """Return a writable view of a row; None where a later row has overwritten it. O(1)."""
        return self._rows[number % len(self._rows)] if self.num_written - number <= len(self._rows) else None

    def last(self, num_rows: int) -> Float64Array:
        """Copy the last rows, oldest first; fewer where fewer are kept. O(rows copied)."""
        first = self.num_written - min(num_rows, len(self))
        return self._rows[np.arange(first, self.num_written) % len(self._rows)]

    def between(self, from_s: float, to_s: float) -> Float64Array:
        """Copy the rows with times in ``[from_s, to_s)``, oldest first. O(rows copied)."""
        turn = self.num_written % len(self._rows)
        older = self._rows[turn:] if self.num_written > len(self._rows) else self._rows[:0]
        newer = self._rows[:turn] if self.num_written != len(self._rows) else self._rows
        parts = [part[slice(*np.searchsorted(part[:, 0], (from_s, to_s)).tolist())] for part in (older, newer)]
        return np.concatenate(parts)


def width_for(seconds: float, unit_s: float = 1) -> float:
    """Return the width of a bucket in seconds, whole units of time, such that there are at most MOST_BUCKETS."""
    return unit_s * max(1, -int(-seconds // (unit_s * MOST_BUCKETS)))


def as_buckets(steps: Float64Array, admissions: Float64Array, width_s: float) -> dict[str, Any]:
    """Sum steps and admissions over buckets; empty buckets are left out. O(steps + admissions).

    Args:
        steps: float64 ``[n, len(STEP_FIELDS)]``, oldest first.
        admissions: float64 ``[m, len(ADMISSION_FIELDS)]``, oldest first.
        width_s: seconds of a bucket; buckets begin at multiples of it.

    Returns:
        ``start_s`` and ``steps`` of each bucket, and the columns of SUMMED and LASTING; ``misses``: triples of a
        bucket's start, the cause's number and the missed tokens.
    """
    begins = (steps[:, 0] // width_s).astype(np.int64)
    starts, firsts, counts = np.unique(begins, return_index=True, return_counts=True)
    lasts = firsts + counts - 1
    columns: dict[str, Any] = {"width_s": width_s, "start_s": (starts * width_s).tolist(), "steps": counts.tolist()}
    for name in SUMMED:
        column = steps[:, STEP_FIELDS.index(name)]
        columns[name] = np.round(np.add.reduceat(column, firsts), 6).tolist() if len(firsts) else []
    for name in LASTING:
        columns[name] = steps[lasts, STEP_FIELDS.index(name)].tolist()
    columns["misses"] = _misses(admissions, width_s)
    return columns


def _misses(admissions: Float64Array, width_s: float) -> list[list[float]]:
    missed = admissions[:, ADMISSION_FIELDS.index("missed")]
    keys = np.stack([admissions[:, 0] // width_s, admissions[:, ADMISSION_FIELDS.index("cause")]], axis=1)
    pairs, places = np.unique(keys, axis=0, return_inverse=True)
    sums = np.bincount(places.ravel(), missed, len(pairs))
    return [[int(begin) * width_s, int(cause), int(tokens)] for (begin, cause), tokens in zip(pairs, sums, strict=True)]


@dataclass(frozen=True, slots=True)
class RingSizes:
    """Rows that are kept of each kind."""

    steps: int = 2**17
    requests: int = 2**16
    admissions: int = 2**17
    samples: int = 2**12


@final
class History:
    """Records steps and requests. Only the thread that runs the steps may call the methods.

    Args:
        subject: the engine, or the replay.
        inspection: the inspection of its block space.
        clock: returns monotonic seconds; times of the history begin at 0.
        sizes: rows of the rings.
        unit_s: seconds of a unit of time.

    Attributes:
        unit_s: seconds over which views sum up steps; may grow.
    """

    def __init__(
        self,
        subject: Subject,
        inspection: SpaceInspection,
        clock: Callable[[], float],
        sizes: RingSizes = RingSizes(),
        unit_s: float = 1,
    ) -> None:
        self._subject = subject
        self.unit_s = unit_s
        self._inspection = inspection
        self._clock = clock
        self._began_s = clock()
        self._num_pools = len(inspection.pool_names)
        self._num_numbers = len(STATES_OF_BLOCKS) + 2 * MOST_TENANTS
        self._steps = Ring(sizes.steps, len(STEP_FIELDS))
        self._requests = Ring(sizes.requests, len(REQUEST_FIELDS))
        self._admissions = Ring(sizes.admissions, len(ADMISSION_FIELDS))
        num_columns = 1 + self._num_pools * self._num_numbers
        self._samples = Ring(min(sizes.samples, MOST_SAMPLES_NBYTES // (8 * num_columns)), num_columns)
        self._next_sample_s = 0.0
        self._tenants: dict[str | None, int] = {None: 0}
        self._waiting: dict[InspectedRequest, int] = {}
        self._running: dict[InspectedRequest, int] = {}
        self._tier_notes: dict[int, tuple[str, ...]] = {}

    @property
    def now_s(self) -> float:
        """Seconds since the history began."""
        return self._clock() - self._began_s

    @property
    def nbytes(self) -> int:
        """Bytes of all rings, which never grow."""
        return sum(ring.nbytes for ring in (self._steps, self._requests, self._admissions, self._samples))

    # Writing

    def note_arrived(self, request: InspectedRequest, arrived_s: float | None = None) -> None:
        """Record the arrival of a request; None: it arrives now. O(tenants)."""
        name = request.scheduled.intent.tenant
        known = name if name in self._inspection.tenant_names else None
        tenant = self._tenants.setdefault(known, len(self._tenants))
        self._waiting[request] = self._requests.append(
            (
                *(request.number, tenant, STATES.index("waiting"), request.scheduled.num_prompt_tokens),
                *(NONE, NONE, NONE, NONE, 0, 0, self.now_s if arrived_s is None else arrived_s, NONE, NONE),
                request.scheduled.priority,
            )
        )

    def note_step(self, record: StepRecord) -> None:
        """Record a step. O(1), and O(requests under way) where some were admitted or ended."""
        now_s = self._clock() - self._began_s
        self._steps.append(
            (
                now_s,
                record.step_id,
                record.num_decoded,
                record.num_prefilled,
                record.num_sampled,
                record.num_admitted,
                record.num_resumed,
                record.num_swapped_out,
                record.num_recomputed,
                record.num_finished,
                record.num_rejected,
                record.num_hit_tokens,
                record.num_running,
                record.num_waiting,
                record.num_swapped,
                record.num_used_blocks,
                record.schedule_seconds,
                record.forward_seconds,
                record.sample_seconds,
                record.finish_seconds,
                record.num_drafted,
                record.num_accepted,
            )
        )
        has_changed = record.num_admitted or record.num_finished or record.num_rejected
        if has_changed or len(self._subject.requests) != len(self._waiting) + len(self._running):  # those were aborted
            self.note_requests()
        if now_s >= self._next_sample_s:
            self._sample(now_s)

    def note_now(self) -> None:
        """Record changes since the last step, before a read. O(requests under way)."""
        self.note_requests()
        if self.now_s >= self._next_sample_s:
            self._sample(self.now_s)

    def note_requests(self) -> None:
        """Record requests that were admitted or have ended since the last call. O(requests under way)."""
        now_s = self.now_s
        for request in [each for each in self._waiting if _has_left_queue(each)]:
            place = self._running[request] = self._waiting.pop(request)
            if request.num_cached_tokens is not None:
                self._admit(request, request.num_cached_tokens, place, now_s)
        for request in [each for each in self._running if each.finish_reason is not None]:
            self._end(request, self._running.pop(request), now_s)

    def _admit(self, request: InspectedRequest, num_hit: int, place: int, now_s: float) -> None:
        explanation = request.explanation
        cause = NONE if explanation is None else number_of(explanation.cause)
        misses = () if explanation is None else explanation.misses
        if misses:
            counted = [(number_of(miss.cause), miss.num_tokens) for miss in misses]
        else:
            counted = [(cause, request.scheduled.num_prompt_tokens - num_hit)]
        for number, (own_cause, num_missed) in enumerate(counted):
            self._admissions.append((now_s, own_cause, 0 if number else num_hit, num_missed))
        row = self._requests.row(place)
        if row is not None:
            row[STATE], row[HIT], row[CAUSE], row[ADMITTED] = STATES.index("running"), num_hit, cause, now_s
            if explanation is not None:
                row[POSITION] = explanation.position
                row[GROUP] = NONE if explanation.group is None else explanation.group

    def _end(self, request: InspectedRequest, place: int, now_s: float) -> None:
        row = self._requests.row(place)
        if row is not None:
            row[STATE] = STATES.index(request.finish_reason or "length")
            row[GENERATED] = request.num_generated_tokens
            row[PREEMPTIONS], row[ENDED] = request.num_preemptions, now_s
        if request.tier_notes:
            self._tier_notes[request.number] = tuple(map(str, request.tier_notes))
            if len(self._tier_notes) > MOST_NOTED:
                del self._tier_notes[next(iter(self._tier_notes))]

    def _sample(self, now_s: float) -> None:
        row = np.zeros((self._num_pools, self._num_numbers))
        for numbers, pool in zip(row, self._inspection.pool_names, strict=True):
            counts = self._inspection.counts(pool)
            numbers[: len(STATES_OF_BLOCKS)] = [getattr(counts, f"num_{state}") for state in STATES_OF_BLOCKS]
            shares = self._inspection.shares(pool)
            by_tenant = numbers[len(STATES_OF_BLOCKS) :].reshape(MOST_TENANTS, 2)
            by_tenant[: len(shares)] = shares[:MOST_TENANTS]
            by_tenant[-1] += shares[MOST_TENANTS:].sum(axis=0)
        self._samples.append([now_s, *row.ravel()])
        self._next_sample_s = now_s + self.unit_s / SAMPLES_A_UNIT

    # Reading

    @property
    def tenant_names(self) -> tuple[str | None, ...]:
        """Names of all tenants that had requests, by the numbers in rows of requests; None: requests without one.

        A space gives the number of a removed tenant to the next one; these numbers stay.
        """
        return tuple(self._tenants)

    def last_step(self) -> Float64Array | None:
        """Copy the last step; None before the first one. O(1)."""
        rows = self._steps.last(1)
        return rows[0] if len(rows) else None

    def arrived_s(self, request: InspectedRequest) -> float:
        """Return the arrival time of a request under way; the present time if it was not recorded. O(1)."""
        place = self._waiting.get(request, self._running.get(request))
        row = None if place is None else self._requests.row(place)
        return self.now_s if row is None else float(row[ARRIVED])

    def steps(self, from_s: float, to_s: float) -> Float64Array:
        """Copy the steps of a span of time, oldest first: float64 ``[n, len(STEP_FIELDS)]``."""
        return self._steps.between(from_s, to_s)

    def admissions(self, from_s: float, to_s: float) -> Float64Array:
        """Copy the first admissions of requests in a span of time: float64 ``[n, len(ADMISSION_FIELDS)]``."""
        return self._admissions.between(from_s, to_s)

    def requests(self, from_s: float, to_s: float, most: int) -> Float64Array:
        """Copy the last requests that were under way in a span of time: float64 ``[n, len(REQUEST_FIELDS)]``.

        By arrival, oldest first. O(requests kept).
        """
        rows = self._requests.last(len(self._requests))
        is_over = (rows[:, ENDED] >= 0) & (rows[:, ENDED] < from_s)
        found: Float64Array = rows[(rows[:, ARRIVED] < to_s) & ~is_over][-most:]
        return found

    def ended(self, most: int) -> Float64Array:
        """Copy the ended ones among the latest requests to arrive, at most ``most``. O(most)."""
        rows = self._requests.last(4 * most)
        found: Float64Array = rows[rows[:, ENDED] >= 0][-most:]
        return found

    def tier_notes(self) -> dict[int, tuple[str, ...]]:
        """Copy what became of what tiers had for the last requests that ended, by their numbers. O(MOST_NOTED)."""
        return self._tier_notes.copy()

    def samples(self, from_s: float, to_s: float) -> Float64Array:
        """Copy the samples of a span of time: float64 ``[n, 1 + pools * (5 + 2 * MOST_TENANTS)]``.

        Each row has the time, then for each pool the number of blocks in each of STATES_OF_BLOCKS, and for each tenant
        the blocks taken and cached.
        """
        return self._samples.between(from_s, to_s)


def _has_left_queue(request: InspectedRequest) -> bool:
    return request.num_cached_tokens is not None or request.finish_reason is not None
