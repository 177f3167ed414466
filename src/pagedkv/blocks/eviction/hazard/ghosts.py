"""Evicted blocks: a table of fragments of digests, each with the run of its block.

Only two loops access the table. A matching fragment is probably the same content: it affects the value of a block, and
is never evidence for a hit. A digest leads to a row of eight ghosts, one cache line. A new ghost overwrites one of a
removed run, else the one of the oldest run.
"""

from typing import Final

from pagedkv.blocks.eviction.hazard.layout import (
    FETCHED,
    FRAGMENT,
    GHOST_FIELDS,
    GHOST_RUN,
    GHOSTS_PER_ROW,
    NEXT_RUN,
    SERIAL_MASK,
)
from pagedkv.blocks.eviction.hazard.serials import NO_RUN, leave_run, slot_of
from pagedkv.blocks.record import NAME, PARENT, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.compilation.instructions import prefetch

__all__ = ["fetch_ghosts", "fetch_next", "leave_ghost", "take_ghost"]

WORD: Final = 2**32 - 1
NAME_SPREAD: Final = 0x9E3779B1  # equal digests of different groups leave different ghosts


@inlined
def _row_of(pool: PoolArrays, first_word: int) -> int:
    """Return the row of a ghost, by the first word of its digest."""
    return int(first_word) * len(pool.eviction_table) >> 32


@inlined
def fetch_ghosts(pool: PoolArrays, first_word: int) -> None:
    """Prefetch the row of the ghost with this first word of its digest."""
    prefetch(pool.eviction_table, _row_of(pool, first_word), 0)


@inlined
def fetch_next(pool: PoolArrays) -> None:
    """Prefetch the row of ghosts of the parent of the block that was fetched for last."""
    block = pool.records[pool.eviction[FETCHED], PARENT]
    pool.eviction[FETCHED] = block
    fetch_ghosts(pool, pool.digests[block, 0])


@inlined
def _fragment_of(pool: PoolArrays, block: int) -> int:
    """Return the fragment of a block's digest and group that identifies its ghost."""
    return (int(pool.digests[block, 1]) + int(pool.records[block, NAME]) * NAME_SPREAD) & WORD


@compiled
def leave_ghost(pool: PoolArrays, block: int, mark: int) -> None:
    """Make the ghost of a block that is evicted, with the run that it is still in (0: none)."""
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
    """Find the run of a newly named block's ghost, and remove the ghost. 0: there is none."""
    table, state = pool.eviction_table, pool.eviction
    row = _row_of(pool, pool.digests[block, 0])
    fragment = _fragment_of(pool, block)
    for place in range(0, GHOSTS_PER_ROW * GHOST_FIELDS, GHOST_FIELDS):
        serial = int(table[row, place + GHOST_RUN])
        if serial != 0 and int(table[row, place + FRAGMENT]) == fragment:
            table[row, place + GHOST_RUN] = 0
            return serial if slot_of(state, len(pool.eviction_runs), serial) != NO_RUN else 0
    return 0
