"""Withdrawing content that turned out bad: a load that was corrupt, a device that computed nonsense.

Bad is what the caller names, and all that continues it, in every group: whoever computed on top of a bad block computed
nonsense. Equal content counts as the same content, so a row is found by the digests of its blocks too, and by how its
block begins where it may have copied the bad one while that was partly filled::

    row a   [A0][A1 bad][A2][A3]      lost from A1 on
    row b   [A0][A1 bad][B2]          lost from A1 on: it shares the block
    cached  [A0][A1 bad][A2][C3]      A0 stays, the rest loses its names
    windows of the same prompts       keep their names where the full group shows that they belong to sound content

What cannot be shown to be sound loses its name: where no full-attention group of equal block size tells what a block
continues, all names of the group, and on the host all names. Where no full-attention group has prefix caching, or none
has the bad content, nobody knows who has read it: all rows are lost. It costs O(blocks + rows x blocks of a row).
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.answers import Withdrawal
from pagedkv.arrays import Int32Array
from pagedkv.pool.block_pool import BlockPool
from pagedkv.pool.blocks import EXTRA, LIFE, NAME, NULL_BLOCK, PARENT, PARENT_LIFE, PENDING_STEP, REF_COUNT
from pagedkv.pool.digests import DIGEST_NBYTES
from pagedkv.pool.ghosts import CALLED_OFF, WITHDRAWN
from pagedkv.pool.life_cycle import drop_name
from pagedkv.pool.prefix_index import find
from pagedkv.space.holding import tickets_out
from pagedkv.space.pending import hand_over, stop_relying
from pagedkv.space.state import Group, SpaceState
from pagedkv.spec import Row
from pagedkv.tables.row_record import mark_rows, set_status
from pagedkv.tables.rows import (
    AT,
    LOST,
    LOST_ON_HOST,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    SWAPPED,
    VACANT,
)
from pagedkv.tables.withdrawing import TAINTED, spread_taint

__all__ = ["withdraw"]

NOWHERE: Final = 2**31 - 1
Digests = set[bytes]


def withdraw(state: SpaceState, pool: BlockPool, bad: Int32Array) -> Withdrawal:
    """Take the names of bad blocks and of all that continues them, and lose the rows that rely on them."""
    state.is_changing = True
    search = _Taint(state, pool, bad)
    search.run()
    num_dropped = _drop_names(state, search)
    firsts = {row: first for row, first in enumerate(search.firsts.tolist()) if first < NOWHERE}
    _lose(state, list(firsts))
    tickets = tuple(ticket for ticket in tickets_out(state) if search.holds_bad(ticket.pool, state.held[ticket]))
    loads = []
    for load, loading in state.loads.items():
        if any(search.holds_bad(ticket.pool, state.held[ticket]) for ticket in loading.tickets):
            loading.is_frozen = True
            loads.append(load)
    answer = Withdrawal(tuple(map(Row, firsts)), tuple(firsts.values()), tickets, tuple(loads), num_dropped)
    state.is_changing = False
    return answer


class _Beginning(NamedTuple):
    """How a bad block begins, as a full group sees it: whoever began it the same way may have a copy of it.

    Args:
        place: logical block; parent: digest of the block before it, empty for the first one.
        extra: id of its extra keys; tokens: int32 ``[n]``, its tokens up to the first bad one.
    """

    place: int
    parent: bytes
    extra: int
    tokens: Int32Array

    def begins_as(self, other: "_Beginning") -> bool:
        """Tell whether both are the beginning of the same content; they have equally many tokens."""
        is_there = (self.place, self.parent, self.extra) == (other.place, other.parent, other.extra)
        return is_there and bool((self.tokens == other.tokens).all())


class _Taint:
    """What is bad: blocks of full groups by their marks, rows from a position on.

    Attributes:
        is_everything: nobody can tell what is sound.
        marks: for each group that keeps whole prefixes uint8 ``[num_blocks]``.
        digests: by lane those of bad content.
        firsts: int64 ``[max_sequences]``, first bad position of each row.
    """

    def __init__(self, state: SpaceState, pool: BlockPool, bad: Int32Array) -> None:
        self._state = state
        self._pool = pool
        self._bad = bad
        has_names = state.config.prefix_caching
        self._chains = [group for group in state.cached_groups if group.keeps_whole_prefix and has_names]
        self._occupied = np.flatnonzero(state.rows[:, STATUS] != VACANT).tolist()
        self.is_everything = False
        self.marks = {group.index: np.zeros(group.pool.num_blocks, np.uint8) for group in self._chains}
        self.digests: list[Digests] = [set() for _ in state.lanes]
        self.firsts = np.full(len(state.rows), NOWHERE, np.int64)

    def run(self) -> None:
        """Find all that is bad."""
        self._look_at_names()
        self._look_at_rows()
        while not self.is_everything:
            before = sum(map(len, self.digests)), self.firsts.sum()
            self._spread()
            if (sum(map(len, self.digests)), self.firsts.sum()) == before:
                return
        self.firsts[self._occupied] = 0

    def holds_bad(self, pool_name: str, blocks: Int32Array) -> bool:
        """Tell whether some blocks are bad."""
        if self.is_everything or (pool_name == self._pool.name and np.isin(blocks, self._bad).any()):
            return True
        return any(
            group.pool.name == pool_name and (self.marks[group.index][blocks] == TAINTED).any()
            for group in self._chains
        )

    def is_sound(self, group: Group, block: int) -> bool:
        """Tell whether a full group shows that a named block of another group continues sound content."""
        if self.is_everything or not self.digests[group.lane]:
            return False
        if group.pool is self._pool and (self._bad == block).any():
            return False
        same = self._in_chain(group, block)
        return same is not None and self.marks[same[0].index][same[1]] != TAINTED

    def _in_chain(self, group: Group, block: int) -> tuple[Group, int] | None:
        """Find the same content in a full group of equal block size."""
        for chain in self._chains:
            if chain.lane == group.lane:
                same = find(chain.pool.arrays, chain.index + 1, group.pool.arrays.digests[block])
                if same != NULL_BLOCK:
                    return chain, same
        return None

    def _look_at_names(self) -> None:
        """Begin with bad blocks that have names, whoever holds them."""
        for block in self._bad.tolist():
            name = int(self._pool.arrays.records[block, NAME])
            if not name:
                continue
            group = self._state.groups[name - 1]
            same = self._in_chain(group, block)
            if same is not None:
                self._taint_beginning(same[0], self._beginning_of_name(*same))
            elif not self._is_held(group, block):
                self.is_everything = True
            self.digests[group.lane].add(self._pool.arrays.digests[block].tobytes())

    def _is_held(self, group: Group, block: int) -> bool:
        """Tell whether a row holds a block: it will say how the block begins."""
        return any(not self._is_on_host(row) and (group.arrays.table[row] == block).any() for row in self._occupied)

    def _look_at_rows(self) -> None:
        """Begin with rows that hold bad blocks."""
        for group in self._state.groups:
            for row in self._occupied:
                held = group.arrays.table[row, : self._count(group, row, NUM_BLOCKS)]
                places = np.flatnonzero(np.isin(held, self._bad))
                if group.pool is not self._pool or self._is_on_host(row) or not len(places):
                    continue
                self.is_everything |= not self._chains
                first = int(places[0]) * group.block_size
                self.firsts[row] = min(self.firsts[row], first)
                for chain in self._chains:
                    if first < self._state.rows[row, NUM_TOKENS]:
                        self._taint_beginning(chain, self._beginning_in_row(chain, row, first))

    def _beginning_of_name(self, chain: Group, block: int) -> _Beginning:
        arrays = chain.pool.arrays
        parent = int(arrays.records[block, PARENT])
        index, ancestor = 0, parent
        while ancestor != NULL_BLOCK:
            index, ancestor = index + 1, int(arrays.records[ancestor, PARENT])
        digest = b"" if parent == NULL_BLOCK else arrays.digests[parent].tobytes()
        return _Beginning(index, digest, int(arrays.records[block, EXTRA]), arrays.tokens[block, :1])

    def _beginning_in_row(self, chain: Group, row: int, first: int) -> _Beginning:
        arrays, table = self._pool_of(chain, row).arrays, chain.arrays.table[row]
        index = first // chain.block_size
        block = int(table[index])
        digest = arrays.digests[table[index - 1]].tobytes() if index else b""
        tokens = arrays.tokens[block, : first % chain.block_size + 1]
        return _Beginning(index, digest, int(arrays.records[block, EXTRA]), tokens)

    def _taint_beginning(self, chain: Group, beginning: _Beginning) -> None:
        """Taint every row and named block of a full group that began a block in the same way."""
        length = len(beginning.tokens)
        position = beginning.place * chain.block_size + length - 1
        for row in self._occupied:
            if position < self._state.rows[row, NUM_TOKENS]:
                other = self._beginning_in_row(chain, row, position)
                if other.begins_as(beginning):
                    self.firsts[row] = min(self.firsts[row], position)
        arrays = chain.pool.arrays
        parent = NULL_BLOCK
        if beginning.place:
            parent = find(arrays, chain.index + 1, np.frombuffer(beginning.parent, np.uint32))
        records = arrays.records[: len(arrays.tokens)]
        begins_so = (records[:, NAME] == chain.index + 1) & (records[:, EXTRA] == beginning.extra)
        begins_so &= (records[:, PARENT] == parent) & (arrays.tokens[:, :length] == beginning.tokens).all(axis=1)
        self.digests[chain.lane].update(_as_bytes(arrays.digests[np.flatnonzero(begins_so)]))

    def _spread(self) -> None:
        """From rows to digests, from digests to what continues them, and from there to rows again."""
        for group in self._chains:
            bad = self.digests[group.lane]
            for row in np.flatnonzero(self.firsts < NOWHERE).tolist():
                bad.update(self._row_digests(group, row)[int(self.firsts[row]) // group.block_size :])
            marks, arrays = self.marks[group.index], group.pool.arrays
            marks[marks != TAINTED] = 0
            for digest in bad:
                marks[find(arrays, group.index + 1, np.frombuffer(digest, np.uint32))] = TAINTED
            marks[NULL_BLOCK] = 0
            spread_taint(arrays, group.index + 1, marks)
            bad.update(_as_bytes(arrays.digests[np.flatnonzero(marks == TAINTED)]))
            for row in self._occupied:
                for place, digest in enumerate(self._row_digests(group, row)):
                    if digest in bad:
                        self.firsts[row] = min(self.firsts[row], place * group.block_size)
                        break

    def _row_digests(self, group: Group, row: int) -> list[bytes]:
        """Digests of a row's digested blocks, wherever they are."""
        table = group.arrays.table[row, : self._count(group, row, NUM_DIGESTED)]
        return _as_bytes(self._pool_of(group, row).arrays.digests[table])

    def _is_on_host(self, row: int) -> bool:
        return self._state.rows[row, STATUS] in {SWAPPED, LOST_ON_HOST}

    def _pool_of(self, group: Group, row: int) -> BlockPool:
        """Tell in which pool a row's blocks are."""
        pool = group.host_pool if self._is_on_host(row) else group.pool
        assert pool is not None
        return pool

    def _count(self, group: Group, row: int, column: int) -> int:
        return int(self._state.rows[row, int(group.arrays.parameters[AT]) + column])


def _as_bytes(digests: npt.NDArray[np.uint32]) -> list[bytes]:
    raw = np.ascontiguousarray(digests).tobytes()
    return [raw[start : start + DIGEST_NBYTES] for start in range(0, len(raw), DIGEST_NBYTES)]


def _drop_names(state: SpaceState, taint: _Taint) -> int:
    """Take the names of what is bad, and of what cannot be shown to be sound; return how many."""
    if not taint.is_everything and not any(taint.digests):
        return 0
    dropped: list[tuple[BlockPool, int]] = []
    for pool in state.pools.values():
        for block in pool.prefix_index.named_blocks().tolist():
            group = state.groups[int(pool.arrays.records[block, NAME]) - 1]
            if group.keeps_whole_prefix and taint.digests[group.lane] and not taint.is_everything:
                is_kept = taint.marks[group.index][block] != TAINTED and not _is_orphan(pool, block)
            else:
                is_kept = taint.is_sound(group, block)
            if not is_kept:
                dropped.append((pool, block))
    for pool, block in dropped:
        drop_name(pool.arrays, block, WITHDRAWN)
    for pool in state.host_pools.values():
        pool.clear_names(WITHDRAWN)
    return len(dropped)


def _is_orphan(pool: BlockPool, block: int) -> bool:
    """Tell whether what a named block continues is gone: nobody can say what that was."""
    records = pool.arrays.records
    parent = int(records[block, PARENT])
    return parent != NULL_BLOCK and bool(records[parent, LIFE] != records[block, PARENT_LIFE])


def _lose(state: SpaceState, lost: list[int]) -> None:
    """Lose rows; what they were to compute for others falls to these."""
    rows = state.rows
    running = [row for row in lost if rows[row, STATUS] == RUNNING]
    mark = state.next_mark()
    mark_rows(rows, running, mark)
    for row in running:
        if rows[row, NUM_PLANNED] < rows[row, NUM_TOKENS]:
            hand_over(state, row, mark)
            _call_off(state, row)
        stop_relying(state, row)
    set_status(rows, running, LOST)
    swapped = [row for row in lost if rows[row, STATUS] == SWAPPED]
    set_status(rows, swapped, LOST_ON_HOST)


def _call_off(state: SpaceState, row: int) -> None:
    """Drop the names of what a lost row alone was to compute in the open step: it computes nothing any more."""
    for group in state.cached_groups:
        arrays, records = group.pool.arrays, group.pool.arrays.records
        table = group.arrays.table[row, : int(state.rows[row, int(group.arrays.parameters[AT]) + NUM_BLOCKS])]
        is_pending = records[table, PENDING_STEP] == state.open_step
        for block in table[is_pending & (records[table, NAME] > 0) & (records[table, REF_COUNT] == 1)].tolist():
            drop_name(arrays, block, CALLED_OFF)
