"""The work that aborting a step leaves to be done again, in one row and group."""

from pagedkv.blocks.block_record import note_no_content, set_pending
from pagedkv.blocks.blocks import NULL_BLOCK, OPEN_STEP, PENDING_STEP, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import BoolArray, Int32Array
from pagedkv.tables.publishing import rewind_tail
from pagedkv.tables.row_record import publish_to, touch
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_PUBLISHED,
    PLANNED,
    STATUS,
    GroupArrays,
    blocks_for,
)

__all__ = ["find_holders", "renew_new", "renew_pending"]


@compiled
def renew_pending(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, step: int) -> None:
    """Make the blocks that rewound rows will compute again pending for the open step, and unpublished.

    Blocks that were computed before ``step``, the first that was aborted, stay computed, even if a row was to compute
    them again.
    """
    at = group.parameters[AT]
    for row in batch:
        first = rows[row, group.parameters[PLANNED]] // group.parameters[BLOCK_SIZE]
        for index in range(first, rows[row, at + NUM_BLOCKS]):
            block = group.table[row, index]
            if block != NULL_BLOCK and pool.records[block, PENDING_STEP] >= step:
                set_pending(pool.records, block, pool.counts[OPEN_STEP])
        if rows[row, at + NUM_PUBLISHED] > first:
            publish_to(rows, row, at, first)
            rewind_tail(pool, group, rows, row)
        touch(rows, row)


@compiled
def find_holders(group: GroupArrays, rows: Int32Array, status: int, is_wanted: BoolArray, is_holder: BoolArray) -> None:
    """Mark, in ``is_holder[row]``, the rows of one status that hold any block of ``is_wanted[block]``."""
    for row in range(len(rows)):
        if rows[row, STATUS] != status:
            continue
        for index in range(rows[row, group.parameters[AT] + NUM_BLOCKS]):
            if is_wanted[group.table[row, index]]:
                is_holder[row] = True
                break


@compiled
def renew_new(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, is_concerned: BoolArray
) -> None:
    """Make blocks that aborted plans allocated new again, if their row counts no content in them as computed.

    ``is_concerned[block]`` marks these blocks.
    """
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        first = blocks_for(rows[row, group.parameters[PLANNED]], block_size)
        for index in range(first, rows[row, group.parameters[AT] + NUM_BLOCKS]):
            block = group.table[row, index]
            if block != NULL_BLOCK and is_concerned[block]:
                note_no_content(pool.records, block)
