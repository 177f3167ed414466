"""Dating blocks: the epochs of the weights that contribute to the rows' content (:mod:`pagedkv.blocks.epochs`).

A plan dates the blocks that it computes. Until then, a block that the open step computes from its first token on has
the oldest epoch of its row, if that has any, so that rows sharing the block know the age of its prefix.
"""

from pagedkv.blocks.blocks import NULL_BLOCK, OPEN_STEP, PENDING_STEP, PoolArrays
from pagedkv.blocks.epochs import date, date_oldest, undate_newest
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.rows import AT, BLOCK_SIZE, NUM_DIGESTED, NUM_PUBLISHED, PLANNED, GroupArrays, blocks_for

__all__ = ["date_computed", "date_open"]


@compiled
def date_open(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, oldest: Int32Array) -> None:
    """Date the blocks that a batch of rows is about to publish and the open step computes, as far as possible.

    Args:
        oldest: int32 ``[max_sequences]``, the oldest epoch that contributed to each row, or ``UNDATED``.
    """
    at = group.parameters[AT]
    for row in batch:
        planned, block_size = rows[row, group.parameters[PLANNED]], group.parameters[BLOCK_SIZE]
        for index in range(max(planned // block_size, rows[row, at + NUM_PUBLISHED]), rows[row, at + NUM_DIGESTED]):
            block = group.table[row, index]
            if block != NULL_BLOCK and pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
                date_oldest(pool, block, oldest[row])
                if index >= blocks_for(planned, block_size):  # else it begins with dated tokens, or a copy of them
                    undate_newest(pool, block)


@compiled
def date_computed(
    pool: PoolArrays,
    group: GroupArrays,
    batch: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
    oldest: Int32Array,
    epoch: int,
) -> None:
    """Record that positions of a batch of rows are computed with the weights of an epoch.

    Args:
        starts, ends: int32 ``[rows]``, the positions of each row.
        oldest: as in :func:`date_open`, or that epoch if nothing older contributed to the row.
    """
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        row = batch[place]
        for index in range(starts[place] // block_size, blocks_for(ends[place], block_size)):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            date(pool, block, oldest[row], epoch)
