"""Making content findable: full blocks get their names, duplicates are noticed.

Knows rows and names; decides which of two blocks with equal content carries the name. A hit on a
group that keeps its whole prefix is verified by links from parent to child; groups whose prefix may be
partly gone are verified by the digest chain, which pagedkv then computes itself.
"""

from pagedkv.core.blocks import EXTRA, LIFE, NULL_BLOCK, PARENT, PARENT_LIFE, Int32Array, PoolArrays
from pagedkv.core.compiled import compiled, inlined
from pagedkv.core.pool import drop_name
from pagedkv.core.prefix_index import find, name_block
from pagedkv.core.rows import (
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
)

__all__ = ["publish_new_blocks"]

DUPLICATE_FIELDS = 4  # row, logical block, duplicate, the block that carries the name


@inlined
def same_content(pool: PoolArrays, left: int, right: int, block_size: int) -> bool:
    """Compare the tokens and extra keys of two full blocks."""
    if pool.records[left, EXTRA] != pool.records[right, EXTRA]:
        return False
    difference = 0
    for index in range(block_size):
        difference |= pool.tokens[left, index] ^ pool.tokens[right, index]
    return difference == 0


@inlined
def publish_block(pool: PoolArrays, group: GroupArrays, block: int, parent: int, parent_life: int) -> int:
    """Name a block, or find the block that carries its name already; return the carrier."""
    name = group.parameters[NAME_IN_POOL]
    by_links = group.parameters[KIND] == FULL
    other = find(pool, name, pool.digests[block])
    if other == NULL_BLOCK:
        name_block(pool, name, block, parent, parent_life)
        return block
    if other == block:
        return block
    if not same_content(pool, other, block, group.parameters[BLOCK_SIZE]):
        return block  # a forged digest: the newcomer stays unnamed, and nobody is handed the other's content
    record = pool.records[other]
    if not by_links or (record[PARENT] == parent and record[PARENT_LIFE] == parent_life):
        return other
    drop_name(pool, other)  # its own chain is broken, so nobody could have found it
    name_block(pool, name, block, parent, parent_life)
    return block


@compiled
def publish_new_blocks(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    duplicates: Int32Array,
) -> int:
    """Publish every digested block of a batch of rows that was not yet; return the duplicates found.

    A duplicate (a live block whose content another block is named for) goes to ``duplicates`` as
    ``(row, logical block, duplicate, carrier)``; what does not fit there is merely not merged later.
    """
    at = group.parameters[AT]
    num_duplicates = 0
    for row in batch:
        if rows[row, FROZEN]:
            continue
        record = rows[row]
        for index in range(record[at + NUM_PUBLISHED], record[at + NUM_DIGESTED]):
            block = group.table[row, index]
            record[at + NUM_PUBLISHED] = index + 1
            if block == NULL_BLOCK:
                continue
            carrier = publish_block(pool, group, block, record[at + TAIL], record[at + TAIL_LIFE])
            record[at + TAIL] = carrier
            record[at + TAIL_LIFE] = pool.records[carrier, LIFE]
            if carrier != block and num_duplicates < len(duplicates):
                entry = duplicates[num_duplicates]
                entry[0] = row
                entry[1] = index
                entry[2] = block
                entry[3] = carrier
                num_duplicates += 1
    return num_duplicates
