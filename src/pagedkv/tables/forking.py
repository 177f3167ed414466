"""Forking: new rows that share every block of another one."""

from pagedkv.blocks.block_record import add_references
from pagedkv.blocks.blocks import NULL_BLOCK, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.row_record import (
    digest_to,
    freeze_as,
    note_change,
    plan_to,
    publish_to,
    put_entry,
    set_first_block,
    set_num_blocks,
    set_tail,
)
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    FIRST_BLOCK,
    NUM_DIGESTED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
    blocks_for,
)

__all__ = ["fork_row", "inherit"]


@compiled
def inherit(
    rows: Int32Array,
    planned: Int32Array,
    relies_on: Int32Array,
    publish_limits: Int32Array,
    parent: int,
    children: Int32Array,
) -> None:
    """Copy the fields of new rows that equal their parent's at any length; their numbers of tokens are already set.

    Args:
        planned: the columns with how far each group is planned; tokens not planned yet are computed by the parent.
        relies_on, publish_limits: int32 ``[rows]``.
    """
    for child in children:
        freeze_as(rows, child, parent)
        for column in planned:
            plan_to(rows, child, column, rows[child, NUM_TOKENS])
        relies_on[child] = relies_on[parent]
        publish_limits[child] = publish_limits[parent]


@compiled
def fork_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, parent: int, children: Int32Array) -> None:
    """Let new rows share every block of ``parent`` that has content. The caller sets the common columns."""
    at = group.parameters[AT]
    num_blocks = blocks_for(rows[parent, NUM_TOKENS], group.parameters[BLOCK_SIZE])
    for index in range(num_blocks):
        block = group.table[parent, index]
        if block != NULL_BLOCK:
            add_references(pool.records, block, len(children))
    for child in children:
        for index in range(num_blocks):
            put_entry(group.table, child, index, group.table[parent, index])
        set_first_block(rows, child, at, rows[parent, at + FIRST_BLOCK])
        if group.parameters[CACHING]:
            digest_to(rows, child, at, rows[parent, at + NUM_DIGESTED])
            publish_to(rows, child, at, rows[parent, at + NUM_PUBLISHED])
            set_tail(rows, child, at, rows[parent, at + TAIL], rows[parent, at + TAIL_LIFE])
        set_num_blocks(rows, child, at, num_blocks)
        note_change(rows, child, at, 0, num_blocks)
