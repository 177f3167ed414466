"""Merging: duplicates are replaced by their carriers, the blocks with their names, in all tables."""

from pagedkv.blocks.blocks import LIFE, NAME, NULL_BLOCK, PENDING_STEP, REF_COUNT, SETTLED_STEP, PoolArrays
from pagedkv.blocks.life_cycle import adopt, release
from pagedkv.blocks.moments import are_alike
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.publishing import (
    BLOCK,
    BLOCK_LIFE,
    CARRIER,
    CARRIER_LIFE,
    NUM_DUPLICATE_FIELDS,
    rewind_tail,
)
from pagedkv.tables.row_record import note_change, publish_to, put_entry
from pagedkv.tables.rows import AT, LAST_STEP, NUM_BLOCKS, NUM_PUBLISHED, RUNNING, STATUS, GroupArrays

__all__ = ["merge_duplicates"]


@compiled
def merge_duplicates(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    duplicates: Int32Array,
    indexes: Int32Array,
    fates: Int32Array,
    republishing: Int32Array,
    num_before: int,
) -> int:
    """Merge every duplicate if its content and its carrier's content are settled.

    Blocks that turned out, when they were planned, to be computed by different weights are no duplicates. What happens
    to each is decided first; then one pass over the tables does it, however many duplicates there are.

    Args:
        duplicates: int32 ``[n, NUM_DUPLICATE_FIELDS]``; on return the first ones are those that still wait.
        indexes: int32 ``[any]``, their logical blocks, ascending and distinct.
        fates: int32 ``[blocks]``, zeros; receives the carrier that replaces each duplicate, or the negative of a number
            for rows that have to publish it again.
        republishing: int32 ``[max_sequences]``, zeros at first; receives a number for each row that must publish again,
            since its carrier is gone: in the order of the duplicates, from ``num_before + 1`` on.

    Returns how many duplicates wait.
    """
    settled = pool.counts[SETTLED_STEP]
    num_waiting = 0
    for place in range(len(duplicates)):
        entry = duplicates[place]
        block, carrier = entry[BLOCK], entry[CARRIER]
        is_held = pool.records[block, REF_COUNT] > 0 and pool.records[block, LIFE] == entry[BLOCK_LIFE]
        if not is_held or pool.records[block, NAME]:
            continue
        if not pool.records[carrier, NAME] or pool.records[carrier, LIFE] != entry[CARRIER_LIFE]:
            if fates[block] == 0:
                fates[block] = -(num_before + place + 1)
        elif max(pool.records[block, PENDING_STEP], pool.records[carrier, PENDING_STEP]) > settled:
            for field in range(NUM_DUPLICATE_FIELDS):
                duplicates[num_waiting, field] = entry[field]
            num_waiting += 1
        elif are_alike(pool, block, pool, carrier):
            fates[block] = carrier
    _meet_fates(pool, group, rows, indexes, fates, republishing)
    return num_waiting


@compiled
def _meet_fates(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    indexes: Int32Array,
    fates: Int32Array,
    republishing: Int32Array,
) -> None:
    """In every running row, replace duplicates by their carriers, or have the row publish them again."""
    at = group.parameters[AT]
    for row in range(len(rows)):
        if rows[row, STATUS] != RUNNING:
            continue
        for place in range(len(indexes)):
            index = indexes[place]
            if index >= rows[row, at + NUM_BLOCKS]:
                break
            block = group.table[row, index]
            if fates[block] > 0:
                adopt(pool, fates[block])
                put_entry(group.table, row, index, fates[block])
                release(pool, block, rows[row, LAST_STEP])
                note_change(rows, row, at, index, index + 1)
            elif fates[block] < 0:
                unpublish_from(pool, group, rows, row, index)
                if republishing[row] == 0 or republishing[row] > -fates[block]:
                    republishing[row] = -fates[block]


@compiled
def unpublish_from(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int) -> None:
    """Make a row publish again from the first block of the unnamed stretch up to logical block ``index``."""
    at = group.parameters[AT]
    first = index
    while (
        first > 0 and group.table[row, first - 1] != NULL_BLOCK and not pool.records[group.table[row, first - 1], NAME]
    ):
        first -= 1
    if rows[row, at + NUM_PUBLISHED] > first:
        publish_to(rows, row, at, first)
        rewind_tail(pool, group, rows, row)
