"""TierLoads: loads prefixes from tiers before requests are admitted, where loading is faster than computing.

The scheduler calls :meth:`TierLoads.begins_load` for each request that it could admit
(:mod:`pagedkv.scheduling.state`). The blocks after its hit are looked up in the tiers, in their order, without
reading a byte. If the predicted transfer is faster than the predicted computation, blocks are reserved, the tiers read
in parallel, and the request waits without a row::

    device hit | tier 0 has these | tier 1 has these | computed
               `---- one load of the space ----------'
                 all answered, or the deadline: the leading entries without a gap are copied and published

Tiers read into host memory. Once all of them have answered, the entries are copied into the blocks, behind the steps
already launched. A GPU copies beside later steps: a load ends with its copies, or at once if no request runs. A load
may end early at any time. Its blocks are then free at once, and steps that use them are ordered behind its copies.
"""

from collections import deque
from collections.abc import Callable, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, final

from pagedkv.contract.answers import Load as SpaceLoad, Shortage
from pagedkv.contract.arrays import Int32Array
from pagedkv.scheduling import Request
from pagedkv.space import BlockSpace, PrefixHit
from pagedkv.tiers.entry_blocks import BlockBytes, CopyEnd, EntryLayout, fill
from pagedkv.tiers.identity import Run, RunChain
from pagedkv.tiers.served import ComputeRate, LoadUnderWay, RequestLoads, ServedTier, TierCause, TierNote
from pagedkv.tiers.store import Load
from pagedkv.tiers.words import LoadEnd

MOST_WAITS: Final = 3
"""Most loads that a request waits for before one admission."""
SHORTEST_DEADLINE_S: Final = 0.05
TRIED_AGAIN: Final = 32
"""After so many loads predicted to be slower than computing, one run is loaded to measure the speed again."""
FOR_ONCE: Final = frozenset({LoadEnd.LATE, LoadEnd.FAILED, LoadEnd.OUT_OF_SERVICE})
"""After these a request does not wait again: the look-up may still find the entry, and would wait for it twice."""
CAUSES: Final = {
    LoadEnd.ABSENT: TierCause.GONE,
    LoadEnd.LATE: TierCause.TOO_SLOW,
    LoadEnd.GONE: TierCause.GONE,
    LoadEnd.CORRUPT: TierCause.CORRUPT,
    LoadEnd.FAILED: TierCause.FAILED,
    LoadEnd.WITHDRAWN: TierCause.WITHDRAWN,
    LoadEnd.OUT_OF_SERVICE: TierCause.OUT_OF_SERVICE,
    LoadEnd.NONE: TierCause.FAILED,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Consecutive entries of one tier; an end is a segment of its own.

    Args:
        tier: the tier; runs: the entries.
        start, end: positions of their tokens.
        is_end: whether the entry is an end; else they are runs.
    """

    tier: ServedTier
    runs: Sequence[Run]
    start: int
    end: int
    is_end: bool = False


@dataclass(slots=True, eq=False)
class _Filling:
    """The copies of a load's entries into its blocks.

    Args:
        entries: those not copied yet, with their blocks by group.
        num_tokens: tokens that are published once all are copied.
        tickets: the copies under way.
    """

    entries: deque[tuple[Sequence[Int32Array], Sequence[memoryview]]]
    num_tokens: int
    tickets: list[CopyEnd] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A load.

    Args:
        answer: the load of the space.
        segments: its entries by tier; loads: the tiers' loads, in the same order.
        num_tokens: tokens of the prefix if all entries are loaded.
        waiters: requests that wait for it; the first began it.
        filling: the copies into its blocks; None until all tiers have answered.
    """

    answer: SpaceLoad
    segments: list[_Segment]
    loads: list[Load]
    num_tokens: int
    waiters: list[Request]
    filling: _Filling | None = None

    @property
    def is_done(self) -> bool:
        return all(load.result is not None for load in self.loads)


@final
class TierLoads:
    """The loads of one serving loop.

    Args:
        tiers: the tiers.
        space: reserves blocks, and publishes them.
        layout: the blocks of each entry.
        block_bytes: copies entries into blocks.
        rate: the speed at which tokens are computed.
        of_request: returns the record of a request.
        on_arrival: called when a tier has answered, from any thread.
        on_loaded: called with each request whose load has ended.
        withdrawn: digests of blocks whose content turned out bad; neither they nor later blocks are loaded.
    """

    def __init__(  # noqa: PLR0913 - what a loop has
        self,
        tiers: Sequence[ServedTier],
        space: BlockSpace,
        layout: EntryLayout,
        block_bytes: BlockBytes,
        *,
        rate: ComputeRate,
        of_request: Callable[[Request], RequestLoads],
        on_arrival: Callable[[], None],
        on_loaded: Callable[[Request], None],
        withdrawn: AbstractSet[bytes] = frozenset(),
    ) -> None:
        self._tiers = tiers
        self._space = space
        self._layout = layout
        self._bytes = block_bytes
        self._rate = rate
        self._of_request = of_request
        self._on_arrival = on_arrival
        self._on_loaded = on_loaded
        self._withdrawn = withdrawn
        self._under_way: dict[SpaceLoad, _UnderWay] = {}

    def __len__(self) -> int:
        """Count the loads under way."""
        return len(self._under_way)

    @property
    def has_answered(self) -> bool:
        """Whether all tiers of some load have answered. O(loads)."""
        return any(each.is_done for each in self._under_way.values())

    def under_way(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads under way, one value for each tier of a load. O(loads)."""
        return tuple(
            LoadUnderWay(segment.tier.name, segment.start, segment.end, len(each.waiters))
            for each in self._under_way.values()
            for segment in each.segments
        )

    def num_loadable(self, chain: RunChain, num_tokens: int) -> int:
        """Return how many leading tokens of a chain the tiers have, at most ``num_tokens``. Changes nothing."""
        segments = self._find(chain, 0, num_tokens)
        return segments[-1].end if segments else 0

    # Beginning

    def begins_load(self, request: Request, token_ids: Int32Array, match: PrefixHit) -> bool:
        """Begin or join a load of the blocks after a request's hit; return whether the request must wait for it."""
        own = self._of_request(request)
        most = len(token_ids) if request.max_hit_tokens is None else min(len(token_ids), request.max_hit_tokens)
        if own.num_waits >= MOST_WAITS or most - match.num_tokens <= self._layout.block_size:
            return False
        under_way = None if match.loading is None else self._under_way.get(match.loading)
        if under_way is not None:
            own.num_waits += 1
            under_way.waiters.append(request)
            return True
        own.chain.extend(token_ids[:most])
        most = self._up_to_withdrawn(own.chain, most)
        segments = self._find(own.chain, match.num_whole_tokens, most)
        chosen = self._chosen(own, segments, match.num_tokens)
        if not chosen:
            return False
        own.num_waits += 1
        return self._begin(request, own, token_ids, chosen, match.num_tokens)

    def _up_to_withdrawn(self, chain: RunChain, most: int) -> int:
        """Return the position of the first withdrawn block, or ``most``; entries of tiers from there on are removed."""
        layout, num_sound = self._layout, chain.num_blocks_without(self._withdrawn)
        if num_sound == chain.num_blocks:
            return most
        num_tokens = num_sound * layout.block_size
        runs = chain.runs[num_tokens // layout.run_tokens :] if layout.has_runs else []
        keys = [run.key for run in runs]
        if layout.has_ends:
            keys += [chain.end_key(place) for place in range(num_sound + 1, chain.num_blocks + 1)]
        for tier in self._tiers:
            if keys and tier.store.contains(keys).any():
                tier.store.withdraw_keys(keys)
        return num_tokens

    def _find(self, chain: RunChain, num_hit: int, most: int) -> list[_Segment]:
        """Look up the entries after a hit, in all tiers."""
        layout = self._layout
        first = num_hit // layout.run_tokens
        runs = self._segments(chain, first, most // layout.run_tokens) if layout.has_runs else []
        return self._up_to_end(chain, runs, num_hit, most) if layout.has_ends else runs

    def _segments(self, chain: RunChain, first: int, last: int) -> list[_Segment]:
        """Find consecutive runs, each in the first tier that has it."""
        segments: list[_Segment] = []
        while first < last:
            for tier in self._tiers:
                count = tier.store.look_up(chain.runs[first:last])
                if count:
                    break
            else:
                break
            start, end = first * self._layout.run_tokens, (first + count) * self._layout.run_tokens
            segments.append(_Segment(tier, chain.runs[first : first + count], start, end))
            first += count
        return segments

    def _up_to_end(self, chain: RunChain, runs: list[_Segment], num_hit: int, most: int) -> list[_Segment]:
        """Find the last end whose runs are all there, and cut the runs after it."""
        layout = self._layout
        step = layout.alignment // layout.block_size
        places = range(most // layout.alignment * step, num_hit // layout.block_size, -step)
        keys = [chain.end_key(place) for place in places]
        has = [tier.store.contains(keys) for tier in self._tiers]
        reach = runs[-1].end if runs else num_hit // layout.run_tokens * layout.run_tokens
        for index, place in enumerate(places):
            whole = place * layout.block_size // layout.run_tokens * layout.run_tokens
            tier = next((each for each, there in zip(self._tiers, has, strict=True) if there[index]), None)
            if tier is not None and (whole <= reach or not layout.has_runs):
                cut = [_cut(each, whole, layout.run_tokens) for each in runs if each.start < whole]
                num_tokens = place * layout.block_size
                start = whole if layout.has_runs else num_hit  # without runs the end stands for the whole prefix
                return [*cut, _Segment(tier, [chain.end(place)], start, num_tokens, is_end=True)]
        return []

    def _chosen(self, own: RequestLoads, segments: list[_Segment], num_hit: int) -> list[_Segment]:
        """Return the leading segments that are worth waiting for, and note why the others are not."""
        chosen = list(segments)
        while chosen and not self._pays(chosen, num_hit):
            last = chosen.pop()
            last.tier.num_refused_loads += 1
            if self._layout.has_ends:
                chosen = []
            if not chosen and last.tier.num_refused_loads % TRIED_AGAIN == 0:
                return (
                    segments
                    if last.is_end
                    else [_cut(last, last.start + self._layout.run_tokens, self._layout.run_tokens)]
                )
        for each in segments[len(chosen) :]:
            self._note(own, each, each.start, TierCause.FASTER)
        if not segments:
            for tier in self._tiers:
                if tier.store.is_out_of_service:
                    own.notes.append(TierNote(tier.name, 0, 0, TierCause.OUT_OF_SERVICE))
        return chosen

    def _pays(self, segments: Sequence[_Segment], num_hit: int) -> bool:
        """Whether loading is predicted to be faster than computing; True until both have been measured."""
        if all(each.tier.loads == "always" for each in segments):
            return True
        computing_s = self._rate.predict_s(segments[-1].end - num_hit)
        loading_s = [each.tier.store.predict_s(len(each.runs), self._nbytes(each)) for each in segments]
        return computing_s is None or all(each is None or each < computing_s for each in loading_s)

    def _nbytes(self, segment: _Segment) -> int:
        return self._layout.end_nbytes if segment.is_end else len(segment.runs) * self._layout.run_nbytes

    def _begin(
        self, request: Request, own: RequestLoads, token_ids: Int32Array, segments: list[_Segment], num_hit: int
    ) -> bool:
        """Reserve blocks, and begin to read from the tiers; return False if there are no blocks."""
        num_tokens = segments[-1].end
        answer = self._space.load(token_ids, num_tokens, keys=request.keys, tenant=request.intent.tenant)
        if answer is None:
            return False
        if isinstance(answer, Shortage):
            for each in segments:
                self._note(own, each, each.start, TierCause.NO_BLOCKS)
            return False
        computing_s = self._rate.predict_s(num_tokens - num_hit)
        loads = []
        for each in segments:
            deadline_s = each.tier.deadline_s
            if computing_s is not None and each.tier.loads != "always":
                deadline_s = min(deadline_s, max(computing_s, SHORTEST_DEADLINE_S))
            each.tier.num_loads += 1
            loads.append(each.tier.store.load(each.runs, deadline_s, self._on_arrival))
        self._under_way[answer] = _UnderWay(answer, segments, loads, num_tokens, [request])
        return True

    # Ending

    def advance(self, *, none_running: bool) -> None:
        """Copy entries into blocks for the loads whose tiers have all answered, and end loads that are filled.

        Args:
            none_running: whether no request runs. Then all entries are copied now, and a load ends with its copies
                under way. Else at most ``filled_nbytes_a_step`` are copied, and a load ends after its copies.
        """
        budget = None if none_running else self._bytes.filled_nbytes_a_step
        for under_way in [each for each in self._under_way.values() if each.is_done]:
            if under_way.filling is None:
                under_way.filling = self._prepared(under_way)
            while under_way.filling.entries and (budget is None or budget > 0):
                nbytes = self._fill_some(under_way.filling)
                budget = None if budget is None else budget - nbytes
            filling = under_way.filling
            if not filling.entries and (none_running or all(ticket.is_done() for ticket in filling.tickets)):
                self._finish(under_way, filling.num_tokens)

    def end_all(self, cause: TierCause) -> bool:
        """Fail all loads, which frees their blocks; return whether there were any."""
        ended = list(self._under_way.values())
        for under_way in ended:
            self._fail(under_way, cause)
        return bool(ended)

    def leave(self, request: Request) -> None:
        """Remove a request from its load. A load without requests ends."""
        for under_way in list(self._under_way.values()):
            if request in under_way.waiters:
                under_way.waiters.remove(request)
                if not under_way.waiters:
                    self._fail(under_way, TierCause.GAVE_WAY)

    def _fail(self, under_way: _UnderWay, cause: TierCause) -> None:
        for each, load in zip(under_way.segments, under_way.loads, strict=True):
            each.tier.store.cancel(load)
            each.tier.not_loaded[cause] += each.end - each.start
            for request in under_way.waiters:
                self._of_request(request).notes.append(TierNote(each.tier.name, each.start, each.end, cause))
        self._end(under_way, 0)

    def _prepared(self, under_way: _UnderWay) -> _Filling:
        """Collect the leading entries without a gap, with the blocks that they fill."""
        layout, came = self._layout, []
        num_tokens = under_way.segments[0].start
        is_whole = True
        for each, load in zip(under_way.segments, under_way.loads, strict=True):
            assert load.result is not None
            parts = [part for part in load.result.parts if self._has_right_sizes(part)]
            num_runs = len(parts) if is_whole and len(parts) == load.result.num_runs else 0
            is_whole = is_whole and num_runs == len(each.runs)
            first = None if each.is_end else each.start // layout.run_tokens
            came += [(None if first is None else first + place, part) for place, part in enumerate(parts[:num_runs])]
            if num_runs:
                num_tokens = each.end if is_whole else each.start + num_runs * layout.run_tokens
        if (layout.has_ends and not is_whole) or num_tokens <= under_way.answer.num_hit_tokens:
            return _Filling(deque(), 0)
        blocks = [(layout.blocks_of_load(under_way.answer, num_tokens, run), parts) for run, parts in came]
        return _Filling(deque(blocks), num_tokens)

    def _has_right_sizes(self, parts: tuple[memoryview, ...]) -> bool:
        return all(part.nbytes % nbytes == 0 for part, nbytes in zip(parts, self._bytes.nbytes, strict=True))

    def _fill_some(self, filling: _Filling) -> int:
        """Copy some entries into their blocks; return their bytes. If a part is too short, the load is empty."""
        entries, nbytes = [], 0
        while filling.entries and nbytes < self._bytes.filled_nbytes_at_once:
            entries.append(filling.entries.popleft())
            nbytes += sum(part.nbytes for part in entries[-1][1])
        tickets = fill(self._bytes, entries)
        if tickets is None:
            filling.entries.clear()
            filling.num_tokens = 0
        else:
            filling.tickets += tickets
        return nbytes

    def _finish(self, under_way: _UnderWay, num_tokens: int) -> None:
        """Publish the copied blocks, and note for each segment what was loaded."""
        for each, load in zip(under_way.segments, under_way.loads, strict=True):
            self._account(under_way, each, load, num_tokens)
        self._end(under_way, num_tokens)

    def _account(self, under_way: _UnderWay, segment: _Segment, load: Load, num_tokens: int) -> None:
        """Note, for the requests that waited, which tokens of a segment were loaded and which were not."""
        assert load.result is not None
        start = max(segment.start, under_way.answer.num_hit_tokens)
        came = min(max(num_tokens, start), segment.end)
        first = True
        for request in under_way.waiters:
            own = self._of_request(request)
            if came > start:
                own.notes.append(TierNote(segment.tier.name, start, came, TierCause.LOADED, load.result.wait_s))
                if first:
                    own.brought.append((segment.tier, start, came))
                    segment.tier.num_loaded_tokens += came - start
                    segment.tier.num_loads_that_came += 1
                    segment.tier.loaded_s += load.result.wait_s
                first = False
            if load.result.cause in FOR_ONCE:
                own.num_waits = MOST_WAITS
            if came < segment.end:
                cause = CAUSES[load.result.cause]
                own.notes.append(TierNote(segment.tier.name, came, segment.end, cause, load.result.wait_s))
        if came < segment.end:
            segment.tier.not_loaded[CAUSES[load.result.cause]] += segment.end - came

    @staticmethod
    def _note(own: RequestLoads, segment: _Segment, start: int, cause: TierCause) -> None:
        own.notes.append(TierNote(segment.tier.name, start, segment.end, cause))
        segment.tier.not_loaded[cause] += segment.end - start

    def _end(self, under_way: _UnderWay, num_tokens: int) -> None:
        """End a load in the space, and call ``on_loaded`` for its requests."""
        del self._under_way[under_way.answer]
        for ticket in [] if under_way.filling is None else under_way.filling.tickets:
            self._bytes.order_steps_behind(ticket)
        self._space.finish_load(under_way.answer, num_tokens)
        for request in under_way.waiters:
            self._on_loaded(request)


def _cut(segment: _Segment, end: int, run_tokens: int) -> _Segment:
    """Cut a segment of runs at a position."""
    if segment.is_end or segment.end <= end:
        return segment
    num_runs = (end - segment.start) // run_tokens
    return _Segment(segment.tier, segment.runs[:num_runs], segment.start, end)
