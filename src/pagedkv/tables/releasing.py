"""Releasing blocks of rows: one, with its rank among free blocks, or all."""

from typing import Final

import numpy as np

from pagedkv.blocks.blocks import KEPT, NAME, NULL_BLOCK, REF_COUNT, PoolArrays
from pagedkv.blocks.keep_reasons import mark_spare
from pagedkv.blocks.life_cycle import release
from pagedkv.blocks.moments import note_request
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.row_record import put_entry, set_num_blocks
from pagedkv.tables.rows import (
    AT,
    LAST_STEP,
    LOST_ON_HOST,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    SHEDS,
    STATUS,
    SWAPPED,
    GroupArrays,
)

__all__ = ["NO_OUTPUTS", "count_leaving", "release_or_shed", "release_rows"]

UNKNOWN: Final = -1
NO_OUTPUTS: Final = np.zeros(0, np.int32)
"""The argument if the numbers of generated tokens are unknown for all rows."""


@compiled
def count_leaving(rows: Int32Array, batch: Int32Array, unplanned: Int32Array) -> tuple[int, int]:
    """Count the rows of a batch that have something to compute in the open step, and those that are on the host.

    Args:
        unplanned: int32 ``[any]``; receives the former.
    """
    num_unplanned = num_on_host = 0
    for row in batch:
        status = rows[row, STATUS]
        if status == RUNNING and rows[row, NUM_PLANNED] < rows[row, NUM_TOKENS]:
            unplanned[num_unplanned] = row
            num_unplanned += 1
        elif status in (SWAPPED, LOST_ON_HOST):
            num_on_host += 1
    return num_unplanned, num_on_host


@inlined
def release_or_shed(pool: PoolArrays, group: GroupArrays, block: int, last_step: int) -> None:
    """Release one reference to a block. If it was the last and the block has no reason to be kept, it becomes spare."""
    record = pool.records[block]
    if group.parameters[SHEDS] and record[REF_COUNT] == 1 and record[NAME] and not record[KEPT]:
        mark_spare(pool.records, block)
    release(pool, block, last_step)


@compiled
def release_rows(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, num_outputs: Int32Array
) -> None:
    """Release every block of a batch of rows, the tail of each sequence first, after notifying the eviction policy.

    Args:
        num_outputs: int32 ``[rows]``, the tokens that each has generated, or empty if unknown.
    """
    at = group.parameters[AT]
    for place in range(len(batch)):
        row = batch[place]
        output = num_outputs[place] if len(num_outputs) else UNKNOWN
        note_request(pool, group.table[row, : rows[row, at + NUM_BLOCKS]], output)
        for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            release_or_shed(pool, group, block, rows[row, LAST_STEP])
            put_entry(group.table, row, index, NULL_BLOCK)
        set_num_blocks(rows, row, at, 0)
