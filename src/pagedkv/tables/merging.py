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
    INDEX,
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
    republishing: Int32Array,
    num_before: int,
) -> int:
    """Merge every duplicate if its content and its carrier's content are settled.

    Blocks that turned out, when they were planned, to be computed by different weights are no duplicates.

    Args:
        duplicates: int32 ``[n, NUM_DUPLICATE_FIELDS]``; on return the first ones are those that still wait.
        republishing: int32 ``[max_sequences]``, zeros at first; receives a number for each row that must publish again,
            since its carrier is gone: in the order of the duplicates, from ``num_before + 1`` on.

    Returns how many duplicates wait.
    """
    settled = pool.counts[SETTLED_STEP]
    num_waiting = 0
    for place in range(len(duplicates)):
        entry = duplicates[place]
        index, block, carrier = entry[INDEX], entry[BLOCK], entry[CARRIER]
        is_held = pool.records[block, REF_COUNT] > 0 and pool.records[block, LIFE] == entry[BLOCK_LIFE]
        if not is_held or pool.records[block, NAME]:
            continue
        if not pool.records[carrier, NAME] or pool.records[carrier, LIFE] != entry[CARRIER_LIFE]:
            unpublish_everywhere(pool, group, rows, index, block, republishing, num_before + place + 1)
        elif max(pool.records[block, PENDING_STEP], pool.records[carrier, PENDING_STEP]) > settled:
            for field in range(NUM_DUPLICATE_FIELDS):
                duplicates[num_waiting, field] = entry[field]
            num_waiting += 1
        elif are_alike(pool, block, pool, carrier):
            replace_everywhere(pool, group, rows, index, block, carrier)
    return num_waiting


@compiled
def replace_everywhere(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, index: int, block: int, carrier: int
) -> None:
    """Replace ``block`` by its carrier in every running row that has it as logical block ``index``."""
    at = group.parameters[AT]
    for row in range(len(rows)):
        if rows[row, STATUS] == RUNNING and index < rows[row, at + NUM_BLOCKS] and group.table[row, index] == block:
            adopt(pool, carrier)
            put_entry(group.table, row, index, carrier)
            release(pool, block, rows[row, LAST_STEP])
            note_change(rows, row, at, index, index + 1)


@compiled
def unpublish_everywhere(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    index: int,
    block: int,
    republishing: Int32Array,
    number: int,
) -> None:
    """Make every running row that has ``block`` as logical block ``index`` publish it and the blocks after it again."""
    at = group.parameters[AT]
    for row in range(len(rows)):
        if rows[row, STATUS] == RUNNING and index < rows[row, at + NUM_BLOCKS] and group.table[row, index] == block:
            unpublish_from(pool, group, rows, row, index)
            if republishing[row] == 0:
                republishing[row] = number


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
