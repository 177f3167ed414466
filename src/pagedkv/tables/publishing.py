"""Publishing: full blocks get their names, and duplicates are found.

This module decides which of two blocks with equal content has the name. A hit in a group that keeps its whole prefix is
verified by links from parent to child. Groups that may have lost parts of a prefix are verified by the digest chain,
which pagedkv then computes itself.
"""

from typing import Final

from pagedkv.blocks.blocks import (
    EXTRA,
    LIFE,
    LOOKAHEAD,
    NAME,
    NULL_BLOCK,
    PARENT,
    PARENT_LIFE,
    PoolArrays,
)
from pagedkv.blocks.keep_reasons import note_ahead
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.moments import FETCHED_AHEAD, are_alike, expect, is_fresher
from pagedkv.blocks.prefix_index import find, is_child_of, name_block
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.row_record import publish_to, set_tail
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    FROZEN,
    FULL,
    KIND,
    NAME_IN_POOL,
    NUM_DIGESTED,
    NUM_PUBLISHED,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
    first_sure_block,
)

__all__ = ["INDEX", "NUM_DUPLICATE_FIELDS", "count_unpublished", "publish_new_blocks", "rewind_tail"]

# Fields of a duplicate. They include lives, since blocks may have other content by the time it is merged (merging.py).
# They do not include the row, which may be gone by then, while its forks refer to the block.
INDEX: Final = 0  # logical block
BLOCK: Final = 1
BLOCK_LIFE: Final = 2
CARRIER: Final = 3
CARRIER_LIFE: Final = 4
NUM_DUPLICATE_FIELDS: Final = 5


@inlined
def same_content(pool: PoolArrays, left: int, right: int, block_size: int) -> bool:
    """Whether two full blocks have equal tokens and extra keys."""
    if pool.records[left, EXTRA] != pool.records[right, EXTRA]:
        return False
    difference = 0
    for index in range(block_size):
        difference |= pool.tokens[left, index] ^ pool.tokens[right, index]
    return difference == 0


@inlined
def publish_block(pool: PoolArrays, group: GroupArrays, block: int, parent: int, parent_life: int) -> int:
    """Name a block, or find the block that has its name already; return the block with the name.

    Content to which older weights contributed counts as different. A fresher block takes over the name; others stay
    unnamed, and are returned themselves.
    """
    name = group.parameters[NAME_IN_POOL]
    by_links = group.parameters[KIND] == FULL
    other = find(pool, name, pool.digests[block])
    if other == NULL_BLOCK:
        name_block(pool, name, block, parent, parent_life)
        return block
    if not same_content(pool, other, block, group.parameters[BLOCK_SIZE]):
        return block  # a forged digest: the new block stays unnamed, and no row gets the other's content by a hit
    record = pool.records[other]
    if not by_links or (record[PARENT] == parent and record[PARENT_LIFE] == parent_life):
        if are_alike(pool, other, pool, block):
            return other
        if not is_fresher(pool, block, other):
            return block
    elif parent != NULL_BLOCK and (not pool.records[parent, NAME] or pool.records[parent, LIFE] != parent_life):
        return block  # its own chain is broken: if its parent is published again, so is this block
    drop_name(pool, other)  # its chain is broken, so it could not be hit; or older weights contributed to it
    name_block(pool, name, block, parent, parent_life)
    return block


@compiled
def rewind_tail(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int) -> None:
    """Set the parent of the next block to be published: the block with the name of the last published content."""
    at = group.parameters[AT]
    record = rows[row]
    last = record[at + NUM_PUBLISHED] - 1
    tail = group.table[row, last] if last >= 0 else NULL_BLOCK
    if group.parameters[KIND] == FULL and tail != NULL_BLOCK and not pool.records[tail, NAME]:
        tail = carrier_of_duplicate(pool, group, row, last)
    set_tail(rows, row, at, tail, pool.records[tail, LIFE])


@compiled
def carrier_of_duplicate(pool: PoolArrays, group: GroupArrays, row: int, last: int) -> int:
    """Find the block that has the name of an unnamed block's content; the unnamed block itself if there is none.

    It is found link by link from the last named block before it, since a digest alone, which a caller may have forged,
    does not make a parent. O(unnamed blocks before it), which are few, since duplicates are merged soon (all, in a
    frozen row).
    """
    name = group.parameters[NAME_IN_POOL]
    first = last
    while first > 0 and not pool.records[group.table[row, first - 1], NAME]:
        first -= 1
    carrier = group.table[row, first - 1] if first > 0 else NULL_BLOCK
    for index in range(first, last + 1):
        block = group.table[row, index]
        child = find(pool, name, pool.digests[block])
        if child == NULL_BLOCK or not is_child_of(pool, name, child, carrier):
            return int(group.table[row, last])
        if not same_content(pool, child, block, group.parameters[BLOCK_SIZE]):
            return int(group.table[row, last])
        carrier = child
    return int(carrier)


@compiled
def count_unpublished(group: GroupArrays, rows: Int32Array, batch: Int32Array) -> int:
    """Count the digested blocks of a batch of rows that were not offered to the index yet."""
    at = group.parameters[AT]
    num_blocks = 0
    for row in batch:
        num_blocks += max(0, rows[row, at + NUM_DIGESTED] - rows[row, at + NUM_PUBLISHED])
    return num_blocks


@compiled
def publish_new_blocks(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    duplicates: Int32Array,
) -> int:
    """Publish all digested blocks of a batch of rows that were not published yet; return the number of duplicates.

    A duplicate is a block in use whose content is named by another block.

    Args:
        duplicates: int32 ``[count_unpublished(...), NUM_DUPLICATE_FIELDS]``.
    """
    at = group.parameters[AT]
    num_duplicates = 0
    for row in batch:
        record = rows[row]
        num_digested = record[at + NUM_DIGESTED]
        if record[FROZEN] or record[at + NUM_PUBLISHED] >= num_digested:
            continue
        first_sure = first_sure_block(group, rows, row)
        for index in range(record[at + NUM_PUBLISHED], num_digested):
            block = group.table[row, index]
            expect(pool, pool.digests[group.table[row, min(index + FETCHED_AHEAD, num_digested - 1)], 0])
            publish_to(rows, row, at, index + 1)
            if block == NULL_BLOCK:  # a gap, of a row that was swapped: what comes after it has no parent here
                set_tail(rows, row, at, NULL_BLOCK, pool.records[NULL_BLOCK, LIFE])
                continue
            if index < first_sure:
                continue
            carrier = publish_block(pool, group, block, record[at + TAIL], record[at + TAIL_LIFE])
            if group.parameters[KIND] == FULL and index >= LOOKAHEAD:
                note_ahead(pool.records, group.table[row, index - LOOKAHEAD], carrier)
            set_tail(rows, row, at, carrier, pool.records[carrier, LIFE])
            if carrier != block:
                entry = duplicates[num_duplicates]
                entry[INDEX] = index
                entry[BLOCK] = block
                entry[BLOCK_LIFE] = pool.records[block, LIFE]
                entry[CARRIER] = carrier
                entry[CARRIER_LIFE] = pool.records[carrier, LIFE]
                num_duplicates += 1
    return num_duplicates
