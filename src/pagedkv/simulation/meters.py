"""Measurements while a trace is served, of one figure a class: ages, misses, occupancy, waste, sharing, latencies.

No meter changes the replay. :class:`Meters` has all of them; it receives reports from the clock, and the result is made
from them. :class:`SpaceWatch` records the history of a replay's blocks, and the causes of each admitted prompt's
misses.

Events of the block space report which content is stored and removed. The time of the last release is found by reading
the reference counts after each operation that may have lowered them. Only the rules of retention of the core are used
here.

A timeline has a bounded number of intervals for any duration. At first each step is an interval. When there are too
many, neighbours are merged in pairs; from then on the shortest interval is their mean. Levels are averaged over the
seconds of an interval; counts add up.

Waste is slots without a token: in the blocks in use, in blocks of other sizes, and in contiguous reservations. The
three reservations are those of the systems to which PagedAttention is compared (Kwon et al., SOSP 2023, sections 3.1
and 6.1: Orca with an oracle, with powers of two, and with the maximum length). Each figure is a mean over decode steps.

A :class:`RequestLog` takes the place of all meters where the times and hits of each request suffice, in 44 bytes a
request. Times between tokens are counted in a histogram with bins 1 % wide, since there is one time for every token;
they are the seconds of decoding steps. A preemption is not included in them, but in the time per token of its request.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.blocks import NULL_BLOCK
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import REMOVED, CacheEvents, Load, Miss, MissCause
from pagedkv.contract.arrays import Float64Array, Int32Array, Int64Array
from pagedkv.contract.plan import BlockMoves, StepPlan
from pagedkv.contract.spec import GroupSpec, keeps_whole_prefix
from pagedkv.planner.traces.request import Tenants
from pagedkv.scheduling import Admission, Batch, Progress, Request, SchedulingConfig
from pagedkv.simulation.config import ServingConfig
from pagedkv.space import BlockSpace, InFlightStep, ObservedSpace, PrefixHit, SpaceObserver, Tail
from pagedkv.space.rows import first_needed_token, rule_of


@dataclass(frozen=True, slots=True, eq=False)
class RunningRows:
    """The running rows.

    Args:
        rows: int32 ``[sequences]``, grouped by request.
        num_rows: int32 ``[requests]``, sequences of each.
        num_final_tokens: tokens that all sequences will have at their end.
        num_power_tokens: the same, each rounded up to a power of two, as in a buddy allocator.
    """

    rows: Int32Array
    num_rows: Int32Array
    num_final_tokens: int
    num_power_tokens: int

    @property
    def has_branches(self) -> bool:
        """Whether a request has several sequences."""
        return len(self.rows) > len(self.num_rows)


def rows_of(running: Sequence[Request]) -> RunningRows:
    """Collect the rows of running requests."""
    return RunningRows(
        rows=np.array([row for request in running for row in request.rows], np.int32),
        num_rows=np.array([len(request.rows) for request in running], np.int32),
        num_final_tokens=sum(len(request.rows) * request.most_tokens for request in running),
        num_power_tokens=sum(len(request.rows) << (request.most_tokens - 1).bit_length() for request in running),
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step.

    Args:
        num_new_tokens: positions computed.
        num_attended_pairs: (query, key) pairs, as if there were no windows.
        num_context_tokens: sum of the lengths of the sequences with tokens in the step.
        num_sequences: number of these sequences.
        num_swapped_out_blocks, num_swapped_in_blocks: blocks moved to the host pools and back.
        num_swapped_tokens: slots of these blocks; with several pools, weighted by their bytes.
    """

    num_new_tokens: int
    num_attended_pairs: int
    num_context_tokens: int
    num_sequences: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_swapped_tokens: float


def work_of(plan: StepPlan, tokens_per_block: Mapping[str, float]) -> StepWork:
    """Count the work of a plan; ``tokens_per_block`` converts swapped blocks of each pool to tokens."""
    starts, ends = plan.compute.starts, plan.compute.ends
    counts = (ends - starts).astype(np.int64)
    num_new_tokens = int(counts.sum())
    swaps = (*plan.swaps_out, *plan.swaps_in)
    return StepWork(
        num_new_tokens=num_new_tokens,
        num_attended_pairs=(int(np.dot(counts, starts + ends)) + num_new_tokens) // 2,
        num_context_tokens=int(ends.sum(dtype=np.int64)),
        num_sequences=len(ends),
        num_swapped_out_blocks=_num_moved(plan.swaps_out),
        num_swapped_in_blocks=_num_moved(plan.swaps_in),
        num_swapped_tokens=sum(len(move.src_ids) * tokens_per_block[move.pool] for move in swaps),
    )


def _num_moved(moves: tuple[BlockMoves, ...]) -> int:
    return sum(len(move.src_ids) for move in moves)


@dataclass(slots=True)
class RequestTiming:
    """One request.

    Args:
        arrival_s: time of arrival on the virtual clock.
        is_admitted: whether it was admitted before.
        has_first_token: whether its prompt was computed before.
        most_computed: most computed tokens of one of its sequences at a preemption by recompute.
    """

    arrival_s: float
    is_admitted: bool = False
    has_first_token: bool = False
    most_computed: int = 0


class RequestTimings:
    """The requests under way."""

    def __init__(self) -> None:
        self._of: dict[Request, RequestTiming] = {}
        self._recomputing: dict[Request, int] = {}

    def begin(self, request: Request, arrival_s: float) -> None:
        """Add a request."""
        self._of[request] = RequestTiming(arrival_s)

    def end(self, request: Request) -> RequestTiming:
        """Remove a request, and return its timing."""
        self._recomputing.pop(request, None)
        return self._of.pop(request)

    def __getitem__(self, request: Request) -> RequestTiming:
        """Return the timing of a request under way."""
        return self._of[request]

    def preempted(self, request: Request, num_computed_tokens: int) -> None:
        """Record that the computed tokens of a request are lost."""
        timing = self._of[request]
        timing.most_computed = max(timing.most_computed, num_computed_tokens)
        self._recomputing[request] = timing.most_computed

    def num_recomputed_tokens(self, batch: Batch) -> int:
        """Count the tokens of an unfinished batch that were computed before a preemption."""
        if not self._recomputing:
            return 0
        num_tokens = sum(
            max(0, min(chunk.stop, self._of[chunk.request].most_computed) - chunk.start) for chunk in batch.prefilling
        )
        for request, most_computed in self._recomputing.items():
            decodes = request.decoding is not None and request.decoding is batch.decoding
            if decodes and most_computed >= request.num_prompt_tokens + request.num_generated:
                num_tokens += request.num_sequences
        return num_tokens


class SpaceWatch(SpaceObserver):
    """Observes a space that records events, and records releases, hits and evictions of its blocks.

    Attributes:
        history: the last release of each block.
        now_s: the virtual time.
    """

    def __init__(self) -> None:
        """Start empty; :meth:`begin` follows."""
        self.now_s = 0.0
        self._misses: list[tuple[Miss, ...]] = []
        self._leaving: dict[str, list[Int32Array]] = {}
        self._loads: dict[Load, dict[str, list[Int32Array]]] = {}

    def begin(self, space: ObservedSpace) -> None:
        """Start to observe a space."""
        self._space = space
        self.history = BlockHistory(space, space.config.groups)

    def take_misses(self) -> list[tuple[Miss, ...]]:
        """Return the misses of each prompt allocated since the last call, with their causes, in order."""
        misses, self._misses = self._misses, []
        return misses

    # Events of the space

    def admitting(self, row: int, hit: PrefixHit) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the end of a prompt's hit and its cause, before blocks are evicted for the prompt."""
        self._misses.append(self._space.misses(hit))

    def admitted(self, row: int, hit: PrefixHit, num_reached: int) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the hits of a prompt, and the evictions for its new blocks."""
        self.history.admitted(row, hit.num_tokens, hit.tails, self.now_s)

    def grown(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the evictions for new blocks."""
        self.history.note_events(self.now_s)

    def returned(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the evictions for new blocks."""
        self.history.note_events(self.now_s)

    def leaving(self, batch: Int32Array) -> None:
        """Remember the blocks of some rows."""
        self._leaving = self.history.blocks_of(batch.tolist())

    def freed(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record which of their blocks are no longer referenced."""
        self.history.released(self._leaving, self.now_s)

    def swapped_out(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record which of their blocks on the device are no longer referenced."""
        self.history.released(self._leaving, self.now_s)

    def load_begun(self, load: Load, hit: PrefixHit) -> None:
        """Remember the blocks of a load, and record the evictions for its new ones."""
        self._loads[load] = self.history.blocks_of_load(hit.block_ids, load.block_ids)
        self.history.note_events(self.now_s)

    def load_ended(self, load: Load) -> None:
        """Record which of a load's blocks are no longer referenced."""
        self.history.released(self._loads.pop(load), self.now_s)

    def acknowledging(self, step: InFlightStep) -> None:
        """Remember the blocks that windows may release."""
        self.history.before_acknowledge(step.plan)

    def acknowledged(self, step: InFlightStep) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record which of them are no longer referenced."""
        self.history.after_acknowledge(self.now_s)

    def advanced(self, now_s: float) -> None:
        """Set the time of all further records."""
        self.now_s = now_s


UPPER_EDGES_S: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""Upper ends, inclusive, of all intervals but the last, which is open. The first has the age 0 alone."""


class AgeHistogram:
    """Counts by age in seconds, 0 or more."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(UPPER_EDGES_S) + 1, np.int64)

    def add(self, ages_s: npt.NDArray[np.float64]) -> None:
        """Count some ages."""
        places = np.searchsorted(UPPER_EDGES_S, ages_s, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))

    def as_dict(self) -> dict[str, object]:
        """Return the counts for JSON; None is the end of the last interval."""
        return {"upper_edges_s": [*UPPER_EDGES_S, None], "num_blocks": self._counts.tolist()}


NOT_RELEASED: Final = -1.0


class PoolHistory:
    """One pool's blocks.

    Attributes:
        hits_by_age: seconds from release to hit of each hit block; 0 if it was in use.
        evictions_by_age: the same for evicted blocks.
        num_evictions: evicted blocks.
        num_never_reused: evicted blocks without any hit.
    """

    def __init__(self, num_blocks: int) -> None:
        self._released_s = np.full(num_blocks, NOT_RELEASED)
        self._was_hit = np.zeros(num_blocks, np.bool_)
        self.hits_by_age = AgeHistogram()
        self.evictions_by_age = AgeHistogram()
        self.num_evictions = 0
        self.num_never_reused = 0

    def hit(self, block_ids: Int32Array, ref_counts: Int32Array, now_s: float) -> None:
        """Record that a new sequence shares some blocks; their reference counts include it."""
        self.hits_by_age.add(np.where(ref_counts > 1, 0.0, now_s - self._released_s[block_ids]))
        self._released_s[block_ids] = NOT_RELEASED
        self._was_hit[block_ids] = True

    def released(self, block_ids: Int32Array, now_s: float) -> None:
        """Record that some blocks are no longer referenced."""
        self._released_s[block_ids] = now_s

    def note(self, events: CacheEvents, ref_counts: Int32Array, now_s: float) -> None:
        """Record removed and stored blocks; a block's removal comes before its storing.

        Removed blocks that were free and are in use now were evicted. The others lost a name that could not be hit.
        """
        is_removal = events.kinds == REMOVED
        if not is_removal.any():
            self._forget(events.block_ids)
            return
        removed = events.block_ids[is_removal]
        evicted = removed[(self._released_s[removed] != NOT_RELEASED) & (ref_counts[removed] > 0)]
        self.evictions_by_age.add(now_s - self._released_s[evicted])
        self.num_evictions += len(evicted)
        self.num_never_reused += int((~self._was_hit[evicted]).sum())
        self._forget(events.block_ids)

    def _forget(self, block_ids: Int32Array) -> None:
        """Record that some blocks have new content, or content that cannot be hit."""
        self._released_s[block_ids] = NOT_RELEASED
        self._was_hit[block_ids] = False


class BlockHistory:
    """The blocks of all pools of a space.

    Args:
        space: the space, with events on.
        group_specs: its groups.
    """

    def __init__(self, space: ObservedSpace, group_specs: Sequence[GroupSpec]) -> None:
        self._space = space
        self._groups = list(enumerate(group_specs))
        self._sliding = [(index, spec) for index, spec in self._groups if not keeps_whole_prefix(spec)]
        self._slid: dict[str, list[Int32Array]] = {}
        self.pools = {name: PoolHistory(count) for name, count in space.config.blocks_by_pool().items()}

    def note_events(self, now_s: float) -> None:
        """Record the events since the last call; called after every operation that stores or evicts."""
        if self._space.has_events:
            for events in self._space.drain_events():
                self.pools[events.pool].note(events, self._space.ref_counts(events.pool), now_s)

    def admitted(self, row: int, num_hit_tokens: int, tails: Sequence[Tail], now_s: float) -> None:
        """Record the hits of a sequence just allocated, and then the evictions for its new blocks.

        The sequence has copies of the kept states of its hit (``tails``).
        """
        for tail in tails:
            pool, blocks = self._groups[tail.group][1].pool, np.array([tail.block], np.int32)
            self.pools[pool].hit(blocks, self._space.ref_counts(pool)[blocks] + 1, now_s)
        for index, spec in self._groups:
            hits = self._space.block_table(index)[row, : num_hit_tokens // spec.block_size]
            hits = hits[hits > 0]
            self.pools[spec.pool].hit(hits, self._space.ref_counts(spec.pool)[hits], now_s)
        self.note_events(now_s)

    def released(self, held: dict[str, list[Int32Array]], now_s: float) -> None:
        """Record which of some blocks, by pool, are no longer referenced."""
        self.note_events(now_s)  # first: a block whose name is withdrawn is not evicted
        self._note_released(held, now_s)

    def blocks_of(self, rows: list[int]) -> dict[str, list[Int32Array]]:
        """Copy the block ids of some rows, by pool."""
        held: dict[str, list[Int32Array]] = {}
        for index, spec in self._groups:
            table = self._space.block_table(index)
            counts = self._space.num_blocks(rows, index).tolist()
            held.setdefault(spec.pool, []).extend(
                table[row, :count].copy() for row, count in zip(rows, counts, strict=True)
            )
        return held

    def blocks_of_load(self, hits: Sequence[Int32Array], new: Sequence[Int32Array]) -> dict[str, list[Int32Array]]:
        """Collect the block ids that a load holds, by pool: those of its hit, and those behind it, group by group."""
        held: dict[str, list[Int32Array]] = {}
        for (_, spec), found, taken in zip(self._groups, hits, new, strict=True):
            held.setdefault(spec.pool, []).extend((found, taken))
        return held

    def _note_released(self, held: dict[str, list[Int32Array]], now_s: float) -> None:
        for pool, block_ids in held.items():
            known = np.concatenate(block_ids)
            known = known[known > 0]
            self.pools[pool].released(known[self._space.ref_counts(pool)[known] == 0], now_s)

    # When a step is acknowledged, windows slide, and rows that continued a kept state have their copy of it

    def before_acknowledge(self, plan: StepPlan) -> None:
        """Remember the blocks that the acknowledgement of a plan may release."""
        if not self._sliding:
            return
        self._slid = {}
        for index, spec in self._sliding:
            table = self._space.block_table(index)
            for row, end in zip(plan.compute.rows.tolist(), plan.compute.ends.tolist(), strict=True):
                stop = first_needed_token(*rule_of(spec), end) // spec.block_size
                self._slid.setdefault(spec.pool, []).append(table[row, :stop].copy())
        for copies in plan.copies:
            self._slid.setdefault(copies.pool, []).append(copies.src_ids)

    def after_acknowledge(self, end_s: float) -> None:
        """Record which of them are no longer referenced."""
        self.note_events(end_s)
        self._note_released(self._slid, end_s)


PERCENTILES: Final = (50, 90, 99)


class LatencyMeter:
    """Three times of each request, in seconds of the virtual clock."""

    def __init__(self) -> None:
        self.queueing_s = array("d")
        self.first_token_s = array("d")
        self.request_s = array("d")

    def as_dict(self) -> dict[str, object]:
        """Return means, percentiles and largest values for JSON."""
        return {
            "queueing_s": _summary(self.queueing_s),
            "first_token_s": _summary(self.first_token_s),
            "request_s": _summary(self.request_s),
        }


def _summary(times_s: Sequence[float]) -> dict[str, float | None]:
    names = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    if not times_s:
        return dict.fromkeys(names)
    values = [float(np.mean(times_s)), *np.percentile(times_s, PERCENTILES).tolist(), max(times_s)]
    return dict(zip(names, values, strict=True))


_KINDS: Final = {
    "capacity": {
        MissCause.EVICTED,
        MissCause.ORPHANED,
        MissCause.SUPERSEDED,
        MissCause.WINDOW_GONE,
        MissCause.STATE_GONE,
    },
    "changed": {MissCause.CHANGED_TOKENS},
    "keys": {MissCause.OTHER_SALT, MissCause.OTHER_ADAPTER, MissCause.OTHER_MEDIA, MissCause.OTHER_EPOCH},
    "short": {MissCause.NOT_FULL},
    "new": {MissCause.NEVER_STORED},
    "being_computed": {MissCause.BEING_COMPUTED, MissCause.LOADING},
    "unknown": {MissCause.UNKNOWN},
}
OTHER: Final = "other"
MISS_KINDS: Final = (*_KINDS, OTHER)
"""Kinds of causes. Every cause has one of them."""
MISS_LABELS: Final = MappingProxyType(
    {
        "capacity": "evicted, or dropped with a window",
        "changed": "differs from the cached text",
        "keys": "another salt, adapter, medium or epoch",
        "short": "no full block, or the last token",
        "new": "never stored",
        "being_computed": "being computed",
        "unknown": "never stored, or no longer known",
        "other": "other causes",
    }
)
"""The kinds in words, in the order of tables and pages."""
KIND_OF: Final = {cause: kind for kind, causes in _KINDS.items() for cause in causes}


class MissMeter:
    """Counts tokens by kind of cause.

    Attributes:
        num_tokens: the tokens of each kind.
    """

    def __init__(self) -> None:
        self.num_tokens = dict.fromkeys(MISS_KINDS, 0)

    def note(self, misses: Iterable[Miss]) -> None:
        """Count the missed tokens of one prompt."""
        for miss in misses:
            self.num_tokens[KIND_OF.get(miss.cause, OTHER)] += miss.num_tokens

    def as_dict(self) -> dict[str, object]:
        """Return the counts for JSON."""
        return {"num_tokens": sum(self.num_tokens.values()), "by_cause": dict(self.num_tokens)}


@dataclass(slots=True)
class Level:
    """A quantity over time.

    Args:
        peak: its largest value.
        weighted_sum: sum of value times weight; the weight is seconds, or 1 a step.
    """

    peak: int = 0
    weighted_sum: float = 0.0

    def hold(self, value: int, duration_s: float) -> None:
        """Add a duration with this value."""
        self.peak = max(self.peak, value)
        self.weighted_sum += value * duration_s

    def as_dict(self, total_s: float) -> dict[str, object]:
        """Return its mean over all seconds, and its peak."""
        return {"mean": self.weighted_sum / total_s if total_s else 0.0, "peak": self.peak}


@dataclass(slots=True)
class Occupancy:
    """The blocks of one pool: live (in tables), cached, and free without content."""

    live: Level = field(default_factory=Level)
    cached: Level = field(default_factory=Level)
    free: Level = field(default_factory=Level)

    def hold(self, num_live: int, num_cached: int, num_free: int, duration_s: float) -> None:
        """Add a duration with these numbers of blocks."""
        self.live.hold(num_live, duration_s)
        self.cached.hold(num_cached, duration_s)
        self.free.hold(num_free, duration_s)

    def as_dict(self, total_s: float) -> dict[str, object]:
        """Return the three levels for JSON."""
        return {
            "num_live": self.live.as_dict(total_s),
            "num_cached": self.cached.as_dict(total_s),
            "num_free": self.free.as_dict(total_s),
        }


class Branches(NamedTuple):
    """The sequences of requests with several sequences.

    Args:
        table: int32 ``[max_sequences, width]``, the block table.
        rows: int32 ``[sequences]``, grouped by request.
        num_blocks: int32 ``[sequences]``, table entries of each.
        num_rows: int32 ``[requests]``, sequences of each request.
    """

    table: Int32Array
    rows: Int32Array
    num_blocks: Int32Array
    num_rows: Int32Array


class SharingMeter:
    """The mean saving over the decode steps that serve a request of several sequences.

    Args:
        num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._marks = np.zeros(num_blocks, np.int64)
        self._last_mark = 0
        self._num_steps = 0
        self._sum = 0.0

    def measure(self, branches: Branches) -> None:
        """Measure one decode step. O(table entries)."""
        num_distinct = _count_distinct(branches, self._marks, self._last_mark)
        self._last_mark += len(branches.num_rows)
        self._num_steps += 1
        self._sum += 1 - num_distinct / int(branches.num_blocks.sum())

    def as_dict(self) -> dict[str, object]:
        """Return the mean for JSON; None if no request had several sequences."""
        mean = self._sum / self._num_steps if self._num_steps else None
        return {"mean_saving": mean, "num_decode_steps": self._num_steps}


@compiled
def _count_distinct(branches: Branches, marks: Int64Array, last_mark: int) -> int:
    """Sum the numbers of distinct blocks of each request. Null blocks count once for each entry."""
    num_distinct = 0
    place = 0
    for request in range(len(branches.num_rows)):
        mark = last_mark + 1 + request
        for _ in range(branches.num_rows[request]):
            for index in range(branches.num_blocks[place]):
                block = branches.table[branches.rows[place], index]
                if block == NULL_BLOCK or marks[block] != mark:
                    num_distinct += 1
                    marks[block] = mark
            place += 1
    return num_distinct


MOST_INTERVALS: Final = 512
SHORTEST_INTERVAL_S: Final = 1e-9


class Timeline:
    """Levels and counts over time.

    Args:
        levels: names of quantities that have a value at any time.
        counts: names of events that are counted.
    """

    def __init__(self, levels: Sequence[str], counts: Sequence[str]) -> None:
        self._levels = list(levels)
        self._counts = list(counts)
        self._rows = np.zeros((2 * MOST_INTERVALS, 1 + len(levels) + len(counts)))
        self._num_rows = 0
        self._interval_s = 0.0

    def hold(self, duration_s: float, levels: Sequence[float], counts: Sequence[float]) -> None:
        """Add a duration with these levels, and counts."""
        if self._num_rows == 0 or self._is_last_complete():
            self._open_interval()
        row = self._rows[self._num_rows - 1]
        row[0] += duration_s
        row[1 : 1 + len(levels)] += np.multiply(levels, duration_s)
        row[1 + len(levels) :] += counts

    def _is_last_complete(self) -> bool:
        """Whether the last interval is long enough; steps without duration belong to the next interval."""
        return bool(self._rows[self._num_rows - 1, 0] >= max(self._interval_s, SHORTEST_INTERVAL_S))

    def _open_interval(self) -> None:
        if self._num_rows == len(self._rows):
            self._rows[:MOST_INTERVALS] = self._rows[0::2] + self._rows[1::2]
            self._rows[MOST_INTERVALS:] = 0
            self._num_rows = MOST_INTERVALS
            self._interval_s = float(self._rows[:MOST_INTERVALS, 0].mean())
        self._num_rows += 1

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the columns: ``duration_s``, means of levels, sums of counts; float64 ``[intervals]`` each.

        Without any duration there is no interval.
        """
        rows = self._joined()
        if len(rows) > 1 and rows[-1, 0] == 0:  # steps without duration at the very end belong to the interval before
            rows = np.concatenate((rows[:-2], rows[-2:].sum(axis=0, keepdims=True)))
        rows = rows[rows[:, 0] > 0]
        num_levels = len(self._levels)
        means = rows[:, 1 : 1 + num_levels] / rows[:, :1]
        sums = rows[:, 1 + num_levels :]
        return {
            "duration_s": rows[:, 0],
            **dict(zip(self._levels, means.T, strict=True)),
            **dict(zip(self._counts, sums.T, strict=True)),
        }

    def _joined(self) -> npt.NDArray[np.float64]:
        rows = self._rows[: self._num_rows]
        if len(rows) <= MOST_INTERVALS:
            return rows
        rows = self._rows[: len(rows) + len(rows) % 2]
        return rows[0::2] + rows[1::2]


BLOCK_SIZES: Final = (1, 8, 16, 32, 64, 128, 256)


class WasteMeter:
    """Sums of waste over decode steps.

    Args:
        block_size: block size of the first group.
        max_length: tokens of the largest reservation, at least the longest recorded sequence; None: exactly that.
    """

    def __init__(self, block_size: int, max_length: int | None) -> None:
        self._block_size = block_size
        self._max_length = max_length
        self._longest = 1
        self._num_steps = 0
        self._sum = 0.0
        self._sums_by_size = [0.0] * len(BLOCK_SIZES)
        self._sum_exact = 0.0
        self._sum_power = 0.0
        self._sum_of_mean_lengths = 0.0

    def note_length(self, length: int) -> None:
        """Record the length of a sequence of the trace."""
        self._longest = max(self._longest, length)

    def measure(self, lengths: Int32Array, running: RunningRows, num_live: int, lengths_of_tails: Int32Array) -> None:
        """Measure one decode step.

        Args:
            lengths: int32 ``[sequences]``, tokens of each, at least 1.
            running: the sequences.
            num_live: blocks in use.
            lengths_of_tails: int32, lengths of sequences with distinct last blocks, since the last block of a prompt
                may be shared.
        """
        num_tokens = int(lengths.sum())
        num_empty = _count_slots(lengths_of_tails, self._block_size) - int(lengths_of_tails.sum())
        self._num_steps += 1
        self._sum += num_empty / (num_live * self._block_size)
        for place, block_size in enumerate(BLOCK_SIZES):
            self._sums_by_size[place] += 1 - num_tokens / _count_slots(lengths, block_size)
        self._sum_exact += 1 - num_tokens / running.num_final_tokens
        self._sum_power += 1 - num_tokens / running.num_power_tokens
        self._sum_of_mean_lengths += num_tokens / len(lengths)

    def as_dict(self) -> dict[str, object]:
        """Return the means for JSON."""
        num_steps = max(1, self._num_steps)
        max_length = max(self._max_length or 0, self._longest)
        mean_maximum = (self._num_steps - self._sum_of_mean_lengths / max_length) / num_steps
        return {
            "mean": float(self._sum / num_steps),
            "by_block_size": {
                str(size): float(total / num_steps) for size, total in zip(BLOCK_SIZES, self._sums_by_size, strict=True)
            },
            "contiguous": {
                "exact": float(self._sum_exact / num_steps),
                "power_of_two": float(self._sum_power / num_steps),
                "maximum": float(mean_maximum),
            },
            "max_length": max_length,
        }


@compiled
def _count_slots(lengths: Int32Array, block_size: int) -> int:
    """Count the slots of the blocks of sequences with these lengths."""
    num_slots = 0
    for length in lengths:
        num_slots += -(-length // block_size) * block_size
    return num_slots


POOL_LEVELS: Final = ("num_live", "num_cached", "num_free")
LEVELS: Final = ("num_running", "num_waiting", "num_swapped", "num_sequences")
COUNTS: Final = ("num_preemptions", "num_computed_tokens", "num_hit_tokens", "num_prompt_tokens")


class RequestLog:
    """Records of each request, by its number.

    Args:
        limits: limits of a step; they determine what requests wait for.
        records_ended: whether the numbers of ended requests are kept for :meth:`take_ended`.

    Attributes:
        between_tokens: times between tokens.
        waited_s: seconds of steps during which requests waited for admission, by cause: "sequences" or "tokens" if the
            step was at that limit, else "memory".
        num_preemptions: number of preemptions.
        num_with_content: requests whose content is known.
        tenants: tenants by number.
        num_steps: steps so far.
        busy_s: seconds of steps so far.
    """

    def __init__(self, limits: SchedulingConfig, *, records_ended: bool = False) -> None:
        self._limits = limits
        self._records_ended = records_ended
        self._arrival_s = array("d")
        self._first_token_s = array("d")
        self._end_s = array("d")
        self._num_prompt_tokens = array("i")
        self._num_output_tokens = array("i")
        self._num_hit_tokens = array("i")
        self._num_sequences = array("i")
        self._tenant_numbers = array("i")
        self.tenants = Tenants()
        self._ended: list[int] = []
        self._num_decoded = 0
        self._waits_for = "memory"
        self.waited_s = dict.fromkeys(WAITS_FOR, 0.0)
        self.between_tokens = StepHistogram()
        self.num_preemptions = self.num_with_content = self.num_steps = 0
        self.busy_s = 0.0

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used."""
        return False

    @property
    def num_requests(self) -> int:
        """Number of requests that have arrived."""
        return len(self._arrival_s)

    @property
    def arrival_s(self) -> Float64Array:
        """Arrival of each: float64 ``[requests]``, as are the next two; views, so only for a finished run."""
        return np.asarray(self._arrival_s)

    @property
    def first_token_s(self) -> Float64Array:
        """Time of each request's first token; NaN without one."""
        return np.asarray(self._first_token_s)

    @property
    def end_s(self) -> Float64Array:
        """Time of each request's last token; NaN without one."""
        return np.asarray(self._end_s)

    def counts(self, name: str) -> Int32Array:
        """Return num_prompt_tokens, num_output_tokens, num_hit_tokens, num_sequences or tenant_numbers.

        int32 ``[requests]``, a view.
        """
        return np.asarray(getattr(self, f"_{name}"))

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Record a request, which has only its arrival yet."""
        self.num_with_content += has_content
        self._tenant_numbers.append(self.tenants.number(tenant))
        self._arrival_s.append(arrival_s)
        self._first_token_s.append(NOT_YET)
        self._end_s.append(NOT_YET)
        self._num_prompt_tokens.append(request.num_prompt_tokens)
        self._num_output_tokens.append(request.max_new_tokens)
        self._num_hit_tokens.append(-1)
        self._num_sequences.append(request.num_sequences)

    def rejected(self, request: Request) -> None:
        """Record that a request ended without an answer."""
        self._note_ended(request)

    def _note_ended(self, request: Request) -> None:
        if self._records_ended:
            self._ended.append(request.number)

    def take_ended(self) -> list[int]:
        """Return the requests that ended since the last call, by number."""
        ended, self._ended = self._ended, []
        return ended

    def scheduled(self, batch: Batch, now_s: float) -> None:  # noqa: ARG002 - signature of all meters
        """Record the hits of first admissions, and preemptions."""
        for admission in batch.admitted:
            number = admission.request.number
            if self._num_hit_tokens[number] < 0:
                self._num_hit_tokens[number] = admission.num_hit_tokens
        self.num_preemptions += len(batch.preempted)
        for request in batch.rejected:
            self.rejected(request)

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:  # noqa: ARG002 - signature of all meters
        """Record the number of sequences that decode, and the limit that the step reaches."""
        self._num_decoded = len(batch.decoded_token_ids)
        if work.num_sequences >= self._limits.max_sequences:
            self._waits_for = "sequences"
        elif work.num_new_tokens >= self._limits.max_batched_tokens:
            self._waits_for = "tokens"
        else:
            self._waits_for = "memory"

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:  # noqa: ARG002 - signature of all meters
        """Add the time to the resource that the last planned step has used up, if any requests wait."""
        if num_waiting:
            self.waited_s[self._waits_for] += duration_s

    def stepped(self, step_s: float) -> None:
        """Record the seconds of a step."""
        self.num_steps += 1
        self.busy_s += step_s
        if self._num_decoded:
            self.between_tokens.add(step_s, self._num_decoded)

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record first and last tokens."""
        for request in progress.first_tokens:
            if math.isnan(self._first_token_s[request.number]):
                self._first_token_s[request.number] = end_s
        for request in progress.finished:
            self._end_s[request.number] = end_s
            self._note_ended(request)


class Meters:
    """Measures all figures of one replay.

    Args:
        config: the configuration.
        space: the block space of the replay.
        watch: observes the space.
        log: records every request, for figures by parts of the trace; None: no log.
    """

    def __init__(
        self, config: ServingConfig, space: BlockSpace, watch: SpaceWatch, log: RequestLog | None = None
    ) -> None:
        self._log = log
        first = config.group_specs[0]
        self._space = space
        self._watch = watch
        self._first_pool = first.pool
        self._block_size = first.block_size
        pools = list(space.config.pool_names)
        self.num_usable = {pool: count - 1 for pool, count in space.config.blocks_by_pool().items()}
        self.history = watch.history
        self.timings = RequestTimings()
        self.occupancy = {pool: Occupancy() for pool in pools}
        self.waste = WasteMeter(first.block_size, config.max_length)
        self.sharing = SharingMeter(space.config.blocks_by_pool()[first.pool])
        self.latencies = LatencyMeter()
        self.timeline = Timeline([*LEVELS, *(f"{level} {pool}" for pool in pools for level in POOL_LEVELS)], COUNTS)
        self.misses = MissMeter()
        self.sequences = Level()
        self.num_requests = self.num_with_content = self.num_rejected = self.num_finished = 0
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_prompt_blocks = self.num_hit_blocks = self.num_hit_tokens = 0
        self.num_steps = self.num_decode_steps = self.num_computed_tokens = 0
        self.busy_s = 0.0
        self.num_recompute = self.num_swap = self.num_recomputed_tokens = 0
        self.num_swapped_out_blocks = self.num_swapped_in_blocks = 0
        self._since_step = dict.fromkeys(COUNTS, 0)

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used."""
        return True

    # Requests

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Count a request, by whether its content is known."""
        if self._log is not None:
            self._log.arrived(request, arrival_s, has_content=has_content, tenant=tenant)
        self.num_requests += 1
        self.num_with_content += has_content
        self.waste.note_length(request.most_tokens)
        self.timings.begin(request, arrival_s)

    def rejected(self, request: Request) -> None:
        """Count a request that cannot be served."""
        self.num_rejected += 1
        self.timings.end(request)

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Record admitted, preempted and rejected requests."""
        if self._log is not None:
            self._log.scheduled(batch, now_s)
        for admission, misses in zip(batch.admitted, self._watch.take_misses(), strict=True):
            self._admitted(admission, misses, now_s)
        for preempted in batch.preempted:
            self._since_step["num_preemptions"] += 1
            if preempted.kind == "swap":
                self.num_swap += 1
            else:
                self.num_recompute += 1
                self.timings.preempted(preempted.request, preempted.num_computed_tokens)
        for request in batch.rejected:
            self.rejected(request)

    def _admitted(self, admission: Admission, misses: tuple[Miss, ...], now_s: float) -> None:
        """Record an admission; only the hits and the misses of a request's first one count."""
        request, num_hit_tokens = admission.request, admission.num_hit_tokens
        timing = self.timings[request]
        if timing.is_admitted:
            return
        timing.is_admitted = True
        self.latencies.queueing_s.append(now_s - timing.arrival_s)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_prompt_blocks += (request.num_prompt_tokens - 1) // self._block_size
        self.num_hit_tokens += num_hit_tokens
        self.num_hit_blocks += num_hit_tokens // self._block_size
        self.misses.note(misses)
        self._since_step["num_hit_tokens"] += num_hit_tokens
        self._since_step["num_prompt_tokens"] += request.num_prompt_tokens

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record requests that got their first token, or all tokens."""
        if self._log is not None:
            self._log.progressed(progress, end_s)
        for request in progress.first_tokens:
            timing = self.timings[request]
            if not timing.has_first_token:
                timing.has_first_token = True
                self.latencies.first_token_s.append(end_s - timing.arrival_s)
        for request in progress.finished:
            self.num_finished += 1
            self.num_output_tokens += request.max_new_tokens * request.num_sequences
            self.latencies.request_s.append(end_s - self.timings.end(request).arrival_s)

    # Steps

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Measure the work of a planned step."""
        self.num_steps += 1
        self.sequences.hold(len(running.rows), 1.0)
        self.num_computed_tokens += work.num_new_tokens
        self.num_recomputed_tokens += self.timings.num_recomputed_tokens(batch)
        self.num_swapped_out_blocks += work.num_swapped_out_blocks
        self.num_swapped_in_blocks += work.num_swapped_in_blocks
        self._since_step["num_computed_tokens"] += work.num_new_tokens
        if batch.decoding is not None:
            self.num_decode_steps += 1
            self._measure_decode(running)

    def stepped(self, step_s: float) -> None:
        """Count the seconds of a step."""
        self.busy_s += step_s

    def _measure_decode(self, running: RunningRows) -> None:
        lengths = self._space.lengths(running.rows)
        num_live = self._space.num_live_blocks(self._first_pool)
        if not running.has_branches:
            self.waste.measure(lengths, running, num_live, lengths)
            return
        table = self._space.block_table()
        num_blocks = self._space.num_blocks(running.rows)
        _, first = np.unique(table[running.rows, num_blocks - 1], return_index=True)
        self.waste.measure(lengths, running, num_live, lengths[first])
        branches = np.repeat(running.num_rows > 1, running.num_rows)
        num_rows = running.num_rows[running.num_rows > 1]
        self.sharing.measure(Branches(table, running.rows[branches], num_blocks[branches], num_rows))

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Add a duration in which the present state lasts."""
        levels = [len(running.num_rows), num_waiting, num_swapped, len(running.rows)]
        for pool, occupancy in self.occupancy.items():
            num_cached = self._space.num_cached_blocks(pool)
            blocks = self._space.num_live_blocks(pool), num_cached, self._space.num_free_blocks(pool) - num_cached
            occupancy.hold(*blocks, duration_s)
            levels += blocks
        self.timeline.hold(duration_s, levels, list(self._since_step.values()))
        self._since_step = dict.fromkeys(COUNTS, 0)


NOT_YET: Final = math.nan
SHORTEST_S: Final = 1e-7
WIDTH: Final = math.log(1.01)
NUM_BINS: Final = 3500
WAITS_FOR: Final = ("sequences", "tokens", "memory")


class StepHistogram:
    """A histogram of the seconds between tokens, exact within 1 %."""

    def __init__(self) -> None:
        self._num_tokens = np.zeros(NUM_BINS, np.int64)

    def add(self, step_s: float, num_tokens: int) -> None:
        """Count tokens that came ``step_s`` seconds after the previous ones."""
        place = int(math.log(max(step_s, SHORTEST_S) / SHORTEST_S) / WIDTH)
        self._num_tokens[min(place, NUM_BINS - 1)] += num_tokens

    def times_s(self) -> Float64Array:
        """Return the seconds of each token, ascending, within 1 %: float64 ``[tokens]``, so O(tokens) memory."""
        middles_s = SHORTEST_S * np.exp((np.arange(NUM_BINS) + 0.5) * WIDTH)
        return np.repeat(middles_s, self._num_tokens)

    def percentile_s(self, percent: float) -> float | None:
        """Return the seconds within which a percentage of the tokens came; None without tokens."""
        counted = self._num_tokens.cumsum()
        if not counted[-1]:
            return None
        place = int(np.searchsorted(counted, percent / 100 * counted[-1]))
        return SHORTEST_S * math.exp((place + 0.5) * WIDTH)
