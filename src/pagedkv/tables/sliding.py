"""Windows and chunks: the blocks below them are released as a sequence moves on."""

from pagedkv.blocks.blocks import NULL_BLOCK, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.releasing import release_or_shed
from pagedkv.tables.retaining import keep, move_boundary
from pagedkv.tables.row_record import put_entry, set_first_block
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    FIRST_BLOCK,
    KIND,
    LAST_STEP,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_SINK_BLOCKS,
    PLANNED,
    SHEDS,
    SPAN,
    GroupArrays,
)
from pagedkv.tables.rules import first_needed_token

__all__ = ["slide"]


@compiled
def slide(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    computed: Int32Array,
    ends: Int32Array,
    chain_pool: PoolArrays,
    chains: GroupArrays,
) -> None:
    """Release the blocks that the rows of a batch no longer need.

    ``computed[i]`` tokens of ``batch[i]`` are acknowledged. Blocks that a step in flight still reads stay, since such a
    step begins at or after that position. Drafts do not count, as they may be rolled back, nor does what the row is to
    compute again in the open step, which reads a window before it.

    Args:
        ends: int32 ``[max_sequences, NUM_ENDS]``, the ends of all rows (:mod:`~pagedkv.tables.retaining`).
        chain_pool, chains: as for :func:`~pagedkv.tables.retaining.move_boundary`.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        row = batch[place]
        query = min(computed[place], rows[row, NUM_ACCEPTED], rows[row, group.parameters[PLANNED]])
        first_token = first_needed_token(group.parameters[KIND], group.parameters[SPAN], query)
        stop = min(first_token // block_size, rows[row, at + NUM_BLOCKS])
        first = rows[row, at + FIRST_BLOCK]
        if stop <= first:
            continue
        if group.parameters[SHEDS]:
            move_boundary(pool, group, rows, ends, row, query, chain_pool, chains)
        for index in range(stop - 1, max(first, group.parameters[NUM_SINK_BLOCKS]) - 1, -1):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if group.parameters[SHEDS]:
                keep(pool, group, rows, ends, row, index)
            release_or_shed(pool, group, block, rows[row, LAST_STEP])
            put_entry(group.table, row, index, NULL_BLOCK)
        set_first_block(rows, row, at, stop)
