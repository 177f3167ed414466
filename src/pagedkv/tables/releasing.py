"""Giving all blocks of rows back."""

from pagedkv.arrays import Int32Array
from pagedkv.compilation.compiled import compiled
from pagedkv.pool.blocks import NULL_BLOCK, PoolArrays
from pagedkv.tables.retaining import give_up
from pagedkv.tables.rows import AT, LAST_STEP, NUM_BLOCKS, GroupArrays

__all__ = ["release_rows"]


@compiled
def release_rows(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Give back every block of a batch of rows, the tail of each sequence first."""
    at = group.parameters[AT]
    for row in batch:
        for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            give_up(pool, group, block, rows[row, LAST_STEP])
            group.table[row, index] = NULL_BLOCK
        rows[row, at + NUM_BLOCKS] = 0
