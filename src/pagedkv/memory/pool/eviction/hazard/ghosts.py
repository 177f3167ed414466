"""What was evicted: a table of fragments of digests, each with the run that its block was in.

Two loops, and nobody else looks into the table. A fragment that is found says "probably": it decides what is worth
keeping, never what hits. A digest leads to a row of eight ghosts, one cache line; a newcomer takes the place of one
whose run is forgotten, else of the one whose run is oldest.
"""

from typing import Final

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.compilation.instructions import prefetch
from pagedkv.memory.pool.blocks import NAME, PARENT, PoolArrays
from pagedkv.memory.pool.eviction.hazard.layout import (
    FETCHED,
    FRAGMENT,
    GHOST_FIELDS,
    GHOST_RUN,
    GHOSTS_PER_ROW,
    NEXT_RUN,
    SERIAL_MASK,
)
from pagedkv.memory.pool.eviction.hazard.serials import NO_RUN, leave_run, slot_of

__all__ = ["fetch_ghosts", "fetch_next", "leave_ghost", "take_ghost"]

WORD: Final = 2**32 - 1
NAME_SPREAD: Final = 0x9E3779B1  # equal digests of different groups leave different ghosts


@inlined
def _row_of(pool: PoolArrays, first_word: int) -> int:
    """Tell in which row the ghost of content goes, by the first word of its digest."""
    return int(first_word) * len(pool.eviction_table) >> 32


@inlined
def fetch_ghosts(pool: PoolArrays, first_word: int) -> None:
    """Have the processor fetch the row that the ghost of content goes in."""
    prefetch(pool.eviction_table, _row_of(pool, first_word), 0)


@inlined
def fetch_next(pool: PoolArrays) -> None:
    """Have the processor fetch the ghosts among which what is continued by the block before will leave its own."""
    block = pool.records[pool.eviction[FETCHED], PARENT]
    pool.eviction[FETCHED] = block
    fetch_ghosts(pool, pool.digests[block, 0])


@inlined
def _fragment_of(pool: PoolArrays, block: int) -> int:
    """Give the part of a block's digest, and of its group, by which its ghost is known."""
    return (int(pool.digests[block, 1]) + int(pool.records[block, NAME]) * NAME_SPREAD) & WORD


@compiled
def leave_ghost(pool: PoolArrays, block: int, mark: int) -> None:
    """Remember a block that is evicted, and the run that it is in still (0: none)."""
    table, runs, state = pool.eviction_table, pool.eviction_runs, pool.eviction
    if slot_of(state, len(runs), mark) == NO_RUN:
        return
    row = _row_of(pool, pool.digests[block, 0])
    chosen = 0
    furthest = -1
    for place in range(0, GHOSTS_PER_ROW * GHOST_FIELDS, GHOST_FIELDS):
        serial = int(table[row, place + GHOST_RUN])
        is_known = slot_of(state, len(runs), serial) != NO_RUN
        behind = (state[NEXT_RUN] - serial) & SERIAL_MASK if is_known else SERIAL_MASK
        if behind > furthest:
            furthest = behind
            chosen = place
    leave_run(runs, state, int(table[row, chosen + GHOST_RUN]))
    table[row, chosen + FRAGMENT] = _fragment_of(pool, block)
    table[row, chosen + GHOST_RUN] = mark


@compiled
def take_ghost(pool: PoolArrays, block: int) -> int:
    """Find the run that the ghost of a newly named block is in, and take the ghost out of it. 0: none is remembered."""
    table, state = pool.eviction_table, pool.eviction
    row = _row_of(pool, pool.digests[block, 0])
    fragment = _fragment_of(pool, block)
    for place in range(0, GHOSTS_PER_ROW * GHOST_FIELDS, GHOST_FIELDS):
        serial = int(table[row, place + GHOST_RUN])
        if serial != 0 and int(table[row, place + FRAGMENT]) == fragment:
            table[row, place + GHOST_RUN] = 0
            return serial if slot_of(state, len(pool.eviction_runs), serial) != NO_RUN else 0
    return 0
