"""Siblings: the named children of one block, as a linked list, so that a match can compare all of them.

Each block has two links, 8 bytes, which exist only where hits may end inside blocks. The
list begins with the parent's ``SUCCESSOR``, the child that was named last, and continues with older ones::

    parent --SUCCESSOR--> named last <--> named before <--> named first

With these lists, ``SUCCESSOR`` leads to a child as long as the parent has one; without them, it leads nowhere once the
latest child is gone. Children of an ended life of the parent remain linked with each other, and nothing leads to them.
"""

from typing import Final

from pagedkv.blocks.record import NAME, NULL_BLOCK, NUM_SENTINELS, PARENT, PARENT_LIFE, SUCCESSOR, PoolArrays
from pagedkv.compilation.compiled import compiled, featured, inlined, unsigned

OLDER: Final = 0
YOUNGER: Final = 1


@featured
@inlined
def link_child(pool: PoolArrays, block: int, parent: int, parent_life: int) -> None:
    """Put a block that is being named before the other children of its parent in that life."""
    siblings = pool.siblings
    siblings[block, OLDER] = NULL_BLOCK
    siblings[block, YOUNGER] = NULL_BLOCK
    older = pool.records[parent, SUCCESSOR]
    record = pool.records[older]
    if older != NULL_BLOCK and record[NAME] and record[PARENT] == parent and record[PARENT_LIFE] == parent_life:
        siblings[block, OLDER] = older
        siblings[older, YOUNGER] = block


@inlined
def next_child(pool: PoolArrays, block: int) -> int:
    """Return the next older child, which replaces a block as its parent's ``SUCCESSOR`` when it loses its name.

    Without these lists it is the block itself, so the parent's walks end there.
    """
    if len(pool.siblings) == 0 or pool.siblings[block, YOUNGER] != NULL_BLOCK:
        return block
    return unsigned(pool.siblings[block, OLDER])


@featured
@inlined
def unlink_child(pool: PoolArrays, block: int) -> None:
    """Remove a block that is losing its name from the list of its siblings."""
    siblings = pool.siblings
    older, younger = siblings[block, OLDER], siblings[block, YOUNGER]
    if younger != NULL_BLOCK:
        siblings[younger, OLDER] = older
    if older != NULL_BLOCK:
        siblings[older, YOUNGER] = younger
    siblings[block, OLDER] = NULL_BLOCK
    siblings[block, YOUNGER] = NULL_BLOCK


@compiled
def first_unlinked(pool: PoolArrays) -> int:
    """Find a block with a wrong link, or linked with a child of another parent; the null block if there is none."""
    records, siblings = pool.records, pool.siblings
    for block in range(1, min(len(siblings), len(records) - NUM_SENTINELS)):
        for link in (OLDER, YOUNGER):
            other = siblings[block, link]
            if other == NULL_BLOCK:
                continue
            if not (records[block, NAME] and records[other, NAME]) or siblings[other, YOUNGER - link] != block:
                return block
            if records[other, PARENT] != records[block, PARENT]:
                return block
            if records[other, PARENT_LIFE] != records[block, PARENT_LIFE]:
                return block
    return NULL_BLOCK
