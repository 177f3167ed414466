"""Withdrawing content that turned out bad: a load that was corrupt, a device that computed nonsense.

Bad is what the caller names, and all that continues it, in every group: whoever computed on top of a bad block computed
nonsense. Equal content counts as the same content, so a row is found by the digests of its blocks too::

    row a   [A0][A1 bad][A2][A3]      lost from A1 on
    row b   [A0][A1 bad][B2]          lost from A1 on: it shares the block
    cached  [A0][A1 bad][A2][C3]      A0 stays, the rest loses its names
    windows of the same prompts       keep their names where the full group shows that they belong to sound content

What cannot be shown to be sound loses its name: where no full-attention group of equal block size tells what a block
continues, all names of the group, and on the host all names. Where windows or states stand alone, nobody knows who has
read the bad block before it left the window: all rows are lost. It costs O(blocks + rows x blocks of a row).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.arrays import Int32Array
from pagedkv.plan import Withdrawal
from pagedkv.pool.block_pool import BlockPool, drop_name
from pagedkv.pool.blocks import NAME, NULL_BLOCK
from pagedkv.pool.digests import DIGEST_NBYTES
from pagedkv.pool.prefix_index import find
from pagedkv.space.holding import tickets_out
from pagedkv.space.pending import hand_over, stop_relying
from pagedkv.space.state import Group, SpaceState
from pagedkv.spec import Row
from pagedkv.tables.rows import (
    AT,
    LOST,
    LOST_ON_HOST,
    MARK,
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
        self.is_everything = False
        self.marks = {group.index: np.zeros(group.pool.num_blocks, np.uint8) for group in self._chains}
        self.digests: list[Digests] = [set() for _ in state.lanes]
        self.firsts = np.full(len(state.rows), NOWHERE, np.int64)

    def run(self) -> None:
        """Find all that is bad."""
        self._look_at_bad_blocks()
        if self.is_everything:
            self.firsts[self._state.rows[:, STATUS] != VACANT] = 0
            return
        while True:
            before = sum(map(len, self.digests)), self.firsts.sum()
            self._spread()
            if (sum(map(len, self.digests)), self.firsts.sum()) == before:
                return

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
        digest = group.pool.arrays.digests[block]
        for chain in self._chains:
            if chain.lane == group.lane:
                same = find(chain.pool.arrays, chain.index + 1, digest)
                if same != NULL_BLOCK and self.marks[chain.index][same] != TAINTED:
                    return not self._is_bad(group, block)
        return False

    def _is_bad(self, group: Group, block: int) -> bool:
        return group.pool is self._pool and bool((self._bad == block).any())

    def _look_at_bad_blocks(self) -> None:
        for block in self._bad.tolist():
            name = int(self._pool.arrays.records[block, NAME])
            if name:
                self._note_bad(self._state.groups[name - 1], _as_bytes(self._pool.arrays.digests[[block]]))
        for group in self._state.groups:
            if group.pool is not self._pool:
                continue
            for row in np.flatnonzero(np.isin(self._state.rows[:, STATUS], (RUNNING, LOST))).tolist():
                held = group.arrays.table[row, : self._num_blocks(group, row, NUM_BLOCKS)]
                places = np.flatnonzero(np.isin(held, self._bad))
                if len(places):
                    self._note_bad(group, [])
                    self.firsts[row] = min(self.firsts[row], int(places[0]) * group.block_size)

    def _note_bad(self, group: Group, digests: list[bytes]) -> None:
        if not group.keeps_whole_prefix and all(chain.lane != group.lane for chain in self._chains):
            self.is_everything = True
        if not group.stays_out:
            self.digests[group.lane].update(digests)

    def _num_blocks(self, group: Group, row: int, column: int) -> int:
        return int(self._state.rows[row, int(group.arrays.parameters[AT]) + column])

    def _spread(self) -> None:
        """From rows to digests, from digests to what continues them, and from there to rows again."""
        for group in self._chains:
            bad = self.digests[group.lane]
            for row in np.flatnonzero(self.firsts < NOWHERE).tolist():
                bad.update(self._row_digests(group, row)[int(self.firsts[row]) // group.block_size :])
            marks, arrays = self.marks[group.index], group.pool.arrays
            for digest in bad:
                marks[find(arrays, group.index + 1, np.frombuffer(digest, np.uint32))] = TAINTED
            marks[NULL_BLOCK] = 0
            marks[marks != TAINTED] = 0
            spread_taint(arrays, group.index + 1, marks)
            bad.update(_as_bytes(arrays.digests[np.flatnonzero(marks == TAINTED)]))
            for row in np.flatnonzero(self._state.rows[:, STATUS] != VACANT).tolist():
                for place, digest in enumerate(self._row_digests(group, row)):
                    if digest in bad:
                        self.firsts[row] = min(self.firsts[row], place * group.block_size)
                        break

    def _row_digests(self, group: Group, row: int) -> list[bytes]:
        """Digests of a row's digested blocks, wherever they are."""
        on_host = self._state.rows[row, STATUS] in {SWAPPED, LOST_ON_HOST}
        pool = group.host_pool if on_host else group.pool
        assert pool is not None
        return _as_bytes(pool.arrays.digests[group.arrays.table[row, : self._num_blocks(group, row, NUM_DIGESTED)]])


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
                is_kept = taint.marks[group.index][block] != TAINTED
            else:
                is_kept = taint.is_sound(group, block) and bool(taint.digests[group.lane])
            if not is_kept:
                dropped.append((pool, block))
    for pool, block in dropped:
        drop_name(pool.arrays, block)
    for pool in state.host_pools.values():
        pool.clear_names()
    return len(dropped)


def _lose(state: SpaceState, lost: list[int]) -> None:
    """Lose rows; what they were to compute for others falls to these."""
    rows = state.rows
    running = [row for row in lost if rows[row, STATUS] == RUNNING]
    mark = state.next_mark()
    rows[running, MARK] = mark
    for row in running:
        if rows[row, NUM_PLANNED] < rows[row, NUM_TOKENS]:
            hand_over(state, row, mark)
        stop_relying(state, row)
    rows[running, STATUS] = LOST
    swapped = [row for row in lost if rows[row, STATUS] == SWAPPED]
    rows[swapped, STATUS] = LOST_ON_HOST
