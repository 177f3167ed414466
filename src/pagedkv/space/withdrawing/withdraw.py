"""The action: once it is known what is bad, blocks are unnamed and rows are lost."""

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import LIFE, NAME, NULL_BLOCK, PARENT, PARENT_LIFE, PENDING_STEP, REF_COUNT
from pagedkv.blocks.causes import CALLED_OFF, WITHDRAWN
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.contract.answers import Withdrawal
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import Row
from pagedkv.space.holding import tickets_out
from pagedkv.space.pending import hand_over, stop_relying
from pagedkv.space.state import SpaceState
from pagedkv.space.withdrawing.bad import Extent, Taint, name_bad
from pagedkv.space.withdrawing.beginnings import taint_of_beginnings
from pagedkv.space.withdrawing.spreading import spread
from pagedkv.tables.row_record import mark_rows, set_status
from pagedkv.tables.rows import (
    AT,
    LOST,
    LOST_ON_HOST,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    SWAPPED,
)
from pagedkv.tables.withdrawing import TAINTED

__all__ = ["withdraw"]


def withdraw(state: SpaceState, pool: BlockPool, bad: Int32Array) -> Withdrawal:
    """Unname bad blocks and all blocks that continue them, and lose the rows that rely on them."""
    state.is_changing = True
    extent = _all_that_is_bad(state, pool, bad)
    names = _names_to_take(state, extent) if extent.is_anything else []
    if extent.is_anything:
        _take_names(state, names)
    firsts = dict(sorted(extent.taint.firsts.items()))
    _lose(state, list(firsts))
    tickets = tuple(ticket for ticket in tickets_out(state) if extent.holds_bad(ticket.pool, state.held[ticket]))
    loads = []
    for load, loading in state.loads.items():
        if any(extent.holds_bad(ticket.pool, state.held[ticket]) for ticket in loading.tickets):
            loading.is_frozen = True
            loads.append(load)
    answer = Withdrawal(tuple(map(Row, firsts)), tuple(firsts.values()), tickets, tuple(loads), len(names))
    if extent.is_anything and state.observers.withdrawn:
        digests = None if extent.is_everything else frozenset(map(_as_digest, frozenset().union(*extent.taint.digests)))
        for observer in state.observers.withdrawn:
            observer.withdrawn(digests)
    state.is_changing = False
    return answer


def _as_digest(words: bytes) -> bytes:
    """Return a digest from the bytes of its words."""
    return np.frombuffer(words, np.uint32).astype(">u4").tobytes()


def _all_that_is_bad(state: SpaceState, pool: BlockPool, blocks: Int32Array) -> Extent:
    """Find what some bad blocks have spoilt. Changes nothing."""
    bad = name_bad(state, pool, blocks)
    taint = taint_of_beginnings(bad)
    if taint is None:
        everything = Taint((frozenset(),) * len(state.lanes), dict.fromkeys(bad.rows, 0))
        return Extent(bad, everything, {}, is_everything=True)
    return spread(bad, taint)


def _names_to_take(state: SpaceState, extent: Extent) -> list[tuple[BlockPool, int]]:
    """List the named blocks that are bad, or cannot be proved sound."""
    return [
        (pool, block)
        for pool in state.pools.values()
        for block in pool.prefix_index.named_blocks().tolist()
        if not _keeps_its_name(state, extent, pool, block)
    ]


def _keeps_its_name(state: SpaceState, extent: Extent, pool: BlockPool, block: int) -> bool:
    """Return whether a named block is proved sound."""
    group = state.groups[int(pool.arrays.records[block, NAME]) - 1]
    if group.keeps_whole_prefix and extent.taint.digests[group.lane] and not extent.is_everything:
        return bool(extent.marks[group.index][block] != TAINTED) and not _is_orphan(pool, block)
    return extent.is_sound(group, block)


def _take_names(state: SpaceState, names: list[tuple[BlockPool, int]]) -> None:
    """Unname these blocks, and all on the host, where nothing can be proved sound."""
    for pool, block in names:
        drop_name(pool.arrays, block, WITHDRAWN)
    for pool in state.host_pools.values():
        pool.clear_names(WITHDRAWN)


def _is_orphan(pool: BlockPool, block: int) -> bool:
    """Return whether the content that a named block continues is gone, and so is unknown."""
    records = pool.arrays.records
    parent = int(records[block, PARENT])
    return parent != NULL_BLOCK and bool(records[parent, LIFE] != records[block, PARENT_LIFE])


def _lose(state: SpaceState, lost: list[int]) -> None:
    """Lose rows; tokens that they were to compute for other rows are handed over to those."""
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
    """Unname the blocks that a lost row alone was to compute in the open step, since it computes nothing any more."""
    for group in state.cached_groups:
        arrays, records = group.pool.arrays, group.pool.arrays.records
        table = group.arrays.table[row, : int(state.rows[row, int(group.arrays.parameters[AT]) + NUM_BLOCKS])]
        is_pending = records[table, PENDING_STEP] == state.open_step
        for block in table[is_pending & (records[table, NAME] > 0) & (records[table, REF_COUNT] == 1)].tolist():
            drop_name(arrays, block, CALLED_OFF)
