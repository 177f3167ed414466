"""Branching: a new row that begins with a prefix of another row, and continues by itself.

Full blocks are shared. The block in which the prefix ends is copied at once, not at the first write: the other row has
more tokens in it, perhaps under a name, whereas rows that share a partly filled block otherwise have the same tokens in
it::

    parent   [ 7 ][ 4 ][ 9: a b c d ][ 5: ...
    child    [ 7 ][ 4 ][ 3: a b     ]            two tokens of the third block: block 3 becomes a copy of block 9
"""

from pagedkv.blocks.block_record import add_references
from pagedkv.blocks.blocks import NULL_BLOCK, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.growing import copy_block
from pagedkv.tables.publishing import rewind_tail
from pagedkv.tables.row_record import (
    digest_to,
    note_change,
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
    TAIL,
    TAIL_LIFE,
    GroupArrays,
    blocks_for,
)
from pagedkv.tables.truncating import missing_content

__all__ = ["branch_row", "longest_prefix"]


@compiled
def longest_prefix(group: GroupArrays, rows: Int32Array, row: int, most: int) -> int:
    """Return the most tokens, up to ``most``, after which a new row can continue in one group of a row; 0 if none.

    O(tokens) where windows have moved on or a state has advanced.
    """
    length = most
    while length > 0 and missing_content(group, rows, row, length) != 0:
        length -= 1
    return length


@compiled
def branch_row(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, parent: int, child: int, length: int, copy: Int32Array
) -> int:
    """Give a new row the first ``length`` tokens of another one. The caller sets the common columns.

    Args:
        copy: int32 ``[1, 2]``; becomes (source, destination) if the last block is partly filled.

    Returns how many blocks are copied: 1, or 0 if the prefix ends with a block.
    """
    at = group.parameters[AT]
    block_size = int(group.parameters[BLOCK_SIZE])
    num_full, num_blocks = length // block_size, blocks_for(length, block_size)
    for index in range(num_full):
        block = group.table[parent, index]
        put_entry(group.table, child, index, block)
        if block != NULL_BLOCK:
            add_references(pool.records, block, 1)
    if num_blocks > num_full:
        copy[0, 0] = group.table[parent, num_full]
        copy[0, 1] = copy_block(pool, copy[0, 0])
        put_entry(group.table, child, num_full, copy[0, 1])
    set_num_blocks(rows, child, at, num_blocks)
    set_first_block(rows, child, at, min(rows[parent, at + FIRST_BLOCK], num_blocks))
    if group.parameters[CACHING]:
        digest_to(rows, child, at, min(rows[parent, at + NUM_DIGESTED], num_full))
        publish_to(rows, child, at, min(rows[parent, at + NUM_PUBLISHED], num_full))
        if rows[parent, at + NUM_PUBLISHED] > num_full:
            rewind_tail(pool, group, rows, child)
        else:
            set_tail(rows, child, at, rows[parent, at + TAIL], rows[parent, at + TAIL_LIFE])
    note_change(rows, child, at, 0, num_blocks)
    return num_blocks - num_full
