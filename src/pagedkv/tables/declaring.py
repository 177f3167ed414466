"""Content that is declared computed: it was brought from outside, or a device has written it outside any plan.

Only unsettled blocks are visited, so the cost does not grow with the rows' length: a row's unsettled blocks are its
last ones. Rows that rely on others are visited as a whole, since a block that another row computes may come before
blocks that are settled.
"""

from pagedkv.blocks.block_record import note_content, set_pending
from pagedkv.blocks.blocks import NEW, NULL_BLOCK, PENDING_STEP, QUEUE, REF_COUNT, SETTLED_STEP, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.row_record import plan_to
from pagedkv.tables.rows import BLOCK_SIZE, NUM_TOKENS, GroupArrays, blocks_for

__all__ = ["count_shared_unsettled", "declare_planned", "settle_blocks"]


@compiled
def count_shared_unsettled(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, relies_on: Int32Array
) -> int:
    """Count the unsettled blocks of a batch of rows that have several references. Changes nothing."""
    settled = pool.counts[SETTLED_STEP]
    num_shared = 0
    for row in batch:
        for index in range(blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE]) - 1, -1, -1):
            block = group.table[row, index]
            if pool.records[block, PENDING_STEP] > settled:
                num_shared += pool.records[block, REF_COUNT] > 1
            elif block != NULL_BLOCK and relies_on[row] <= settled:
                break
    return num_shared


@compiled
def settle_blocks(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, relies_on: Int32Array
) -> None:
    """Record that the content of all blocks of a batch of rows is computed."""
    settled = pool.counts[SETTLED_STEP]
    for row in batch:
        for index in range(blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE]) - 1, -1, -1):
            block = group.table[row, index]
            if pool.records[block, PENDING_STEP] > settled:
                set_pending(pool.records, block, 0)
                if pool.records[block, QUEUE] == NEW:
                    note_content(pool.records, block)
            elif block != NULL_BLOCK and relies_on[row] <= settled:
                break


@compiled
def declare_planned(rows: Int32Array, batch: Int32Array, planned: int) -> None:
    """Record in a column of a batch of rows that all tokens are planned."""
    for row in batch:
        plan_to(rows, row, planned, rows[row, NUM_TOKENS])
