"""Siblings: the named blocks that continue one block, as a list, so that all of them can be looked at.

Owns two links a block, kept only where hits may end inside blocks (8 bytes a block): the list begins with the parent's
``SUCCESSOR``, the child that was named last, and goes on to older ones::

    parent --SUCCESSOR--> named last <--> named before <--> named first

While it is kept, ``SUCCESSOR`` leads to a child as long as the parent has one; without it, a parent whose latest child
is gone leads nowhere. Children of a life that is over stay linked with each other, and nobody leads to them.
"""

from typing import Final

from pagedkv.memory.compilation.compiled import compiled, inlined, unsigned
from pagedkv.memory.pool.blocks import NAME, NULL_BLOCK, NUM_SENTINELS, PARENT, PARENT_LIFE, SUCCESSOR, PoolArrays

__all__ = ["OLDER", "YOUNGER", "first_unlinked", "link_child", "next_child", "unlink_child"]

OLDER: Final = 0
YOUNGER: Final = 1


@inlined
def link_child(pool: PoolArrays, block: int, parent: int, parent_life: int) -> None:
    """Put a block, which is being named, before the other children of a parent in that life."""
    siblings = pool.siblings
    if len(siblings) == 0:
        return
    siblings[block, OLDER] = NULL_BLOCK
    siblings[block, YOUNGER] = NULL_BLOCK
    older = pool.records[parent, SUCCESSOR]
    record = pool.records[older]
    if older != NULL_BLOCK and record[NAME] and record[PARENT] == parent and record[PARENT_LIFE] == parent_life:
        siblings[block, OLDER] = older
        siblings[older, YOUNGER] = block


@inlined
def next_child(pool: PoolArrays, block: int) -> int:
    """Name the child that its parent's walks go to once a block, where they go now, is gone: the one before it.

    The block itself where no links are kept: such a parent leads nowhere.
    """
    if len(pool.siblings) == 0 or pool.siblings[block, YOUNGER] != NULL_BLOCK:
        return block
    return unsigned(pool.siblings[block, OLDER])


@inlined
def unlink_child(pool: PoolArrays, block: int) -> None:
    """Take a block, which is losing its name, out of the list of its siblings."""
    siblings = pool.siblings
    if len(siblings) == 0:
        return
    older, younger = siblings[block, OLDER], siblings[block, YOUNGER]
    if younger != NULL_BLOCK:
        siblings[younger, OLDER] = older
    if older != NULL_BLOCK:
        siblings[older, YOUNGER] = younger
    siblings[block, OLDER] = NULL_BLOCK
    siblings[block, YOUNGER] = NULL_BLOCK


@compiled
def first_unlinked(pool: PoolArrays) -> int:
    """Name a block whose siblings are not linked with it, or are children of another parent; or the null block."""
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
