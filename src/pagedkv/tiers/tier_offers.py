"""TierOffers: copies computed content to the host after steps, and offers it to the tiers.

A request's tokens are queued when its prompt is computed and when it ends. Their blocks are found by a match, so only
blocks that another request could hit are offered: published, filled and acknowledged ones, whose tokens are compared
before anything is copied::

    prompt computed, request ended --> queued for each tier --> match --> selected by the tier? --> copied --> offered

Copies take a small share of a step: a number of bytes, or a number for each second of the last step. The rest of the
queue waits for the next step, and content that is evicted before is not offered. A tier whose queue is full gets no
offers until it has room.

For a tier that stores before eviction a sequence is queued later, run by run, when its blocks are among the next to be
evicted (:mod:`~pagedkv.tiers.cached_runs`): after a step, and before a request is admitted, whose blocks evict them. No
block is held for it: a copy is ordered before all steps that are launched later. Ends of sequences are stored at once,
as in all tiers, since their windows and states are shed a step later.
"""

from collections import deque
from collections.abc import Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, final
from weakref import WeakKeyDictionary

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.space import BlockSpace
from pagedkv.tiers.cached_runs import CachedRuns, OfferedSequence
from pagedkv.tiers.entry_blocks import BlockBytes, EntryLayout, HostBlocks, longest_end
from pagedkv.tiers.identity import Run, RunChain
from pagedkv.tiers.served import ServedTier

MOST_QUEUED: Final = 512
"""Most sequences in the queue of a tier; beyond that the oldest are dropped."""
ONLY_THE_END: Final = 2**31
"""Number of a run that no sequence has."""
Part = memoryview


@dataclass(slots=True, eq=False)
class _Copy:
    """Entries that are being copied to the host."""

    runs: list[Run]
    blocks: list[list[int]]
    copies: list[HostBlocks]

    @property
    def nbytes(self) -> int:
        return sum(copy.rows.nbytes for copy in self.copies)

    @property
    def is_done(self) -> bool:
        return all(copy.ticket.is_done() for copy in self.copies)


@final
class TierOffers:
    """Offers of one serving loop.

    Args:
        tiers: the tiers.
        space: matches tokens.
        layout: the blocks of each entry.
        block_bytes: copies blocks.
        withdrawn: digests of blocks whose content turned out bad; neither they nor later blocks are offered.
    """

    def __init__(
        self,
        tiers: Sequence[ServedTier],
        space: BlockSpace,
        layout: EntryLayout,
        block_bytes: BlockBytes,
        withdrawn: AbstractSet[bytes] = frozenset(),
    ) -> None:
        self._tiers = tiers
        self._space = space
        self._layout = layout
        self._bytes = block_bytes
        self._withdrawn = withdrawn
        self._cached = CachedRuns(space, layout)
        self._queues: list[deque[OfferedSequence]] = [deque(maxlen=MOST_QUEUED) for _ in tiers]
        self._copies: list[deque[_Copy]] = [deque() for _ in tiers]
        self._offered: list[WeakKeyDictionary[RunChain, list[Run]]] = [WeakKeyDictionary() for _ in tiers]
        self._budget_nbytes = self._left_nbytes = block_bytes.read_nbytes_a_step

    def note_step(self, seconds: float) -> None:
        """Set the bytes that may be copied after the next step, by the seconds of the last one."""
        self._budget_nbytes = max(self._bytes.read_nbytes_a_step, int(seconds * self._bytes.read_nbytes_a_second))

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be copied or offered."""
        return not any(self._queues) and not any(self._copies)

    def add(self, token_ids: Int32Array, num_settled: int, keys: RequestKeys, chain: RunChain) -> None:
        """Queue a sequence for every tier, or let it wait for its eviction. O(tokens)."""
        if num_settled >= self._layout.block_size:
            if num_settled == len(token_ids):  # a match leaves the last token out
                token_ids = np.append(token_ids, np.int32(0))
            for number, tier in enumerate(self._tiers):
                first = ONLY_THE_END if tier.stores_victims else 0
                if first == 0 or self._layout.has_ends:
                    self._queue(number, OfferedSequence(token_ids, num_settled, keys, chain, first))
            if self._has_victims:
                self._cached.add(OfferedSequence(token_ids, num_settled, keys, chain))

    @property
    def _has_victims(self) -> bool:
        """Whether a tier stores before eviction."""
        return any(tier.stores_victims for tier in self._tiers)

    def _queue(self, number: int, sequence: OfferedSequence) -> None:
        """Queue a sequence for a tier. If the queue is full, its oldest sequence is dropped."""
        self._tiers[number].num_dropped += len(self._queues[number]) == MOST_QUEUED
        self._queues[number].append(sequence)

    def _queue_victims(self, sequences: Sequence[OfferedSequence]) -> None:
        """Queue sequences for the tiers that store before eviction."""
        for number, tier in enumerate(self._tiers):
            for sequence in sequences if tier.stores_victims else ():
                self._queue(number, replace(sequence))

    def make_way(self, num_tokens: int) -> None:
        """Offer what is evicted next, before a request with so many new tokens gets its blocks.

        It may copy what the last step has left of its budget.
        """
        if self._has_victims:
            self._queue_victims(self._cached.take_next(num_tokens))
            self._copy_queued()

    def queue_cached(self) -> bool:
        """Queue what waits for its eviction, or as much of it as the queues hold; return whether it was any."""
        sequences = self._cached.take_some(MOST_QUEUED - max(map(len, self._queues), default=0))
        self._queue_victims(sequences)
        return bool(sequences)

    def drop(self) -> None:
        """Forget all that was added; the list of tiers may have changed."""
        self._cached.clear()
        self.drop_queued()

    def drop_queued(self) -> None:
        """Empty all queues; what waits for its eviction goes on waiting, if it is still cached then."""
        self._queues = [deque(maxlen=MOST_QUEUED) for _ in self._tiers]
        self._copies = [deque() for _ in self._tiers]
        self._offered = [WeakKeyDictionary() for _ in self._tiers]

    def advance(self, *, is_idle: bool) -> None:
        """Copy and offer queued content, within a step's budget.

        Args:
            is_idle: no step follows: there is no budget, and the call waits for its copies.
        """
        self._left_nbytes = self._budget_nbytes
        if self._has_victims:
            self._queue_victims(self._cached.take_next(0))
        self._copy_queued(is_idle=is_idle)

    def _copy_queued(self, *, is_idle: bool = False) -> None:
        """Copy and offer queued content, within what is left of the budget."""
        budget = None if is_idle else self._left_nbytes
        for number, tier in enumerate(self._tiers):
            self._offer_copied(number, waits=is_idle)
            if tier.store.is_out_of_service:
                tier.num_dropped += len(self._queues[number])
                self._queues[number].clear()
            while self._queues[number] and (budget is None or budget > 0):
                copied = self._copy_some(number, self._queues[number][0], budget)
                if copied is None:
                    break  # no room: later
                budget = None if budget is None else budget - copied
                self._offer_copied(number, waits=is_idle)
        if budget is not None:
            self._left_nbytes = budget

    def _copy_some(self, number: int, sequence: OfferedSequence, budget: int | None) -> int | None:
        """Begin to copy entries of a sequence; return their bytes. None: the tier has no room now.

        The sequence leaves the queue once each of its entries was copied or is not to be offered.
        """
        store, layout = self._tiers[number].store, self._layout
        hit = self._space.match(sequence.token_ids, keys=sequence.keys, max_hit_tokens=sequence.num_settled)
        num_tokens = hit.num_whole_tokens // layout.block_size * layout.block_size
        chain = sequence.chain
        chain.extend(sequence.token_ids[:num_tokens])
        num_tokens = min(num_tokens, chain.num_blocks_without(self._withdrawn) * layout.block_size)
        at_once = self._bytes.read_nbytes_at_once if budget is None else min(budget, self._bytes.read_nbytes_at_once)
        room = store.room_nbytes - sum(copy.nbytes for copy in self._copies[number])
        if self._bytes.room_nbytes is not None:
            room = min(room, self._bytes.room_nbytes)
        most = min(max(0, room) // max(1, layout.run_nbytes), -(-at_once // max(1, layout.run_nbytes)))
        keeps_count = not self._tiers[number].stores_victims  # of which any runs may be offered, in any order
        first = max(sequence.next_run, self._num_offered(number, chain) if keeps_count else 0)
        last = num_tokens // layout.run_tokens if layout.has_runs else 0
        if most == 0 and first < last:
            return None
        runs = chain.runs[first : min(last, first + most)]
        sequence.next_run = first + len(runs)
        if keeps_count:
            self._offered[number][chain] = chain.runs[: sequence.next_run]
        wanted = [first + place for place in np.flatnonzero(store.select_for_offer(runs)).tolist()]
        self._copy(number, [(chain.runs[run], layout.blocks_of_run(run, hit.block_ids)) for run in wanted])
        if sequence.next_run >= last:
            self._queues[number].popleft()
            if layout.has_ends and sequence.with_end:
                self._copy_end(number, sequence, num_tokens)
        return len(wanted) * layout.run_nbytes

    def _num_offered(self, number: int, chain: RunChain) -> int:
        """Return the number of leading runs that the request has offered before, with its prompt."""
        offered = self._offered[number].get(chain, [])
        same = (mine is theirs for mine, theirs in zip(offered, chain.runs, strict=False))
        return next((place for place, is_same in enumerate(same) if not is_same), min(len(offered), len(chain.runs)))

    def _copy_end(self, number: int, sequence: OfferedSequence, num_tokens: int) -> None:
        """Begin to copy the end of a sequence, if a tier is to be offered it."""
        hit = longest_end(self._space, sequence.token_ids, sequence.keys, num_tokens, self._layout.alignment)
        if hit is not None:
            run = sequence.chain.end(hit.num_tokens // self._layout.block_size)
            if self._tiers[number].store.select_for_offer([run])[0]:
                self._copy(number, [(run, self._layout.blocks_of_end(hit.num_tokens, hit.block_ids))])

    def _copy(self, number: int, entries: list[tuple[Run, list[Int32Array]]]) -> None:
        """Begin to copy the blocks of entries to the host. If the host has no room, they are not offered."""
        if not entries:
            return
        copies: list[HostBlocks] = []
        for group in range(self._layout.num_groups):
            copied = self._bytes.read(group, np.concatenate([blocks[group] for _, blocks in entries]))
            if copied is None:
                self._tiers[number].num_dropped += len(entries)
                return
            copies.append(copied)
        counts = [[len(ids) for ids in blocks] for _, blocks in entries]
        self._copies[number].append(_Copy([run for run, _ in entries], counts, copies))

    def _offer_copied(self, number: int, *, waits: bool) -> None:
        """Offer copied entries, oldest first."""
        copies, tier = self._copies[number], self._tiers[number]
        while copies and (waits or copies[0].is_done):
            copy = copies.popleft()
            for part in copy.copies:
                part.ticket.wait()
            parts = _parts_of(copy)
            for begin, end in _chained(copy.runs):
                tier.num_offered_runs += end - begin
                tier.store.offer(copy.runs[begin:end], parts[begin:end], is_noted=True)


def _parts_of(copy: _Copy) -> list[list[Part]]:
    """Split copied rows into the parts of each entry, one for each group."""
    starts = [0] * len(copy.copies)
    parts = []
    for counts in copy.blocks:
        own = []
        for group, count in enumerate(counts):
            rows = copy.copies[group].rows[starts[group] : starts[group] + count]
            own.append(rows.reshape(-1).data)
            starts[group] += count
        parts.append(own)
    return parts


def _chained(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return ranges of runs in which each continues the one before."""
    starts = [0, *(place for place in range(1, len(runs)) if runs[place].parent != runs[place - 1].key)]
    return list(zip(starts, [*starts[1:], len(runs)], strict=True))
