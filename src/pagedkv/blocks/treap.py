"""Ordered sets of a pool's blocks, with links in the blocks' rows: insert, remove and look up in O(log blocks).

A treap (Seidel and Aragon, "Randomized Search Trees", 1996) is a binary search tree by the order of the blocks, and a
heap by a pseudo-random number of each block. Here that number is a hash of the block's id, so that a tree has the same
shape in every process; callers do not choose the ids of blocks. Each block has two links, to the subtree before it and
to the subtree after it, in adjacent columns of its row; 0, the null block, means none. The root
is linked from the first link of a row that belongs to no member. There are no links upward, since every search begins
at the root.

There are two orders, both of free leased blocks (:mod:`pagedkv.blocks.leasing`)::

    BY_END       the tenant that is charged | the end of the lease | when the block was released
    BY_PARENT    the parent, in its life    | the end of the lease | the block's id
"""

from typing import Final, NamedTuple

from pagedkv.blocks.record import (
    CHARGED,
    FREE,
    LEASED_ROOT,
    LIFE,
    NEXT,
    NULL_BLOCK,
    NUM_SENTINELS,
    PARENT,
    PARENT_LIFE,
    QUEUE,
    RELEASED,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array

BY_END: Final = 0
BY_PARENT: Final = 1
HEAP_SPREAD: Final = 0x9E3779B1
HEAP_MASK: Final = 2**32 - 1


class Links(NamedTuple):
    """The place of the links of an order.

    Args:
        rows: int32 ``[any, any]``, a row for each block, and one for the root.
        root: index of the row with the link to the root.
        column: the link to the subtree before; the link to the subtree after is the next column.
    """

    rows: Int32Array
    root: int
    column: int


@inlined
def links_of(pool: PoolArrays, order: int) -> Links:
    """Return the place of the links of an order."""
    if order == BY_END:
        return Links(pool.records, len(pool.records) - NUM_SENTINELS + LEASED_ROOT, NEXT)
    return Links(pool.lease_links, NULL_BLOCK, 0)


@inlined
def tenant_of(pool: PoolArrays, block: int) -> int:
    """Return the tenant to which a block is charged; 0 without tenants."""
    return int(pool.tenants[block, CHARGED]) if len(pool.tenants) else 0


@inlined
def height_of(block: int) -> int:
    """Hash a block's id; a block with a greater number is nearer to the root. Numbers are unique."""
    mixed = (int(block) * HEAP_SPREAD) & HEAP_MASK
    mixed = ((mixed ^ (mixed >> 15)) * HEAP_SPREAD) & HEAP_MASK
    return mixed ^ (mixed >> 15)


@inlined
def precedes(pool: PoolArrays, order: int, block: int, other: int) -> bool:
    """Whether a block comes before another one in an order."""
    records = pool.records
    if order == BY_END:
        mine, others = tenant_of(pool, block), tenant_of(pool, other)
        if mine != others:
            return mine < others
    else:
        if records[block, PARENT] != records[other, PARENT]:
            return bool(records[block, PARENT] < records[other, PARENT])
        if records[block, PARENT_LIFE] != records[other, PARENT_LIFE]:
            return bool(records[block, PARENT_LIFE] < records[other, PARENT_LIFE])
    if pool.leases[block] != pool.leases[other]:
        return bool(pool.leases[block] < pool.leases[other])
    if order == BY_END:
        return bool(records[block, RELEASED] < records[other, RELEASED])
    return block < other


@compiled
def insert(pool: PoolArrays, order: int, block: int) -> None:
    """Add a block to an order that does not contain it."""
    rows, row, column = links_of(pool, order)
    link = column
    height = height_of(block)
    node = int(rows[row, link])
    while node != NULL_BLOCK and height_of(node) > height:
        row, link = node, column if precedes(pool, order, block, node) else column + 1
        node = int(rows[row, link])
    rows[row, link] = block
    before, before_link, after, after_link = block, column, block, column + 1
    while node != NULL_BLOCK:  # split the subtree that was there into blocks before and after the new one
        if precedes(pool, order, node, block):
            rows[before, before_link] = node
            before, before_link = node, column + 1
            node = int(rows[before, before_link])
        else:
            rows[after, after_link] = node
            after, after_link = node, column
            node = int(rows[after, after_link])
    rows[before, before_link] = NULL_BLOCK
    rows[after, after_link] = NULL_BLOCK


@compiled
def remove(pool: PoolArrays, order: int, block: int) -> None:
    """Remove a block from an order. The fields that determine its place must not have changed since it was added."""
    rows, row, column = links_of(pool, order)
    link = column
    while rows[row, link] != block:
        row, link = int(rows[row, link]), column if precedes(pool, order, block, int(rows[row, link])) else column + 1
    before, after = int(rows[block, column]), int(rows[block, column + 1])
    while before and after:  # join its two subtrees
        if height_of(before) > height_of(after):
            rows[row, link] = before
            row, link = before, column + 1
            before = int(rows[row, link])
        else:
            rows[row, link] = after
            row, link = after, column
            after = int(rows[row, link])
    rows[row, link] = before + after  # one of them is the null block


@compiled
def has(pool: PoolArrays, order: int, block: int) -> bool:
    """Whether an order contains a block."""
    rows, row, column = links_of(pool, order)
    node = int(rows[row, column])
    while node and node != block:
        node = int(rows[node, column if precedes(pool, order, block, node) else column + 1])
    return node == block


@inlined
def root_of(pool: PoolArrays, order: int) -> int:
    """Return the block at the root of an order; the null block if the order is empty."""
    rows, row, column = links_of(pool, order)
    return int(rows[row, column])


@inlined
def is_heap_at(pool: PoolArrays, order: int, block: int) -> bool:
    """Whether the children of a block in the tree have smaller numbers, and are free and leased. For ``check()``."""
    rows, _, column = links_of(pool, order)
    for link in (column, column + 1):
        below = int(rows[block, link])
        if below != NULL_BLOCK and (below >= len(pool.leases) or height_of(below) >= height_of(block)):
            return False
        if below != NULL_BLOCK and (not pool.leases[below] > 0 or pool.records[below, QUEUE] != FREE):
            return False
    return True


@compiled
def first_from(pool: PoolArrays, tenant: int, end: float) -> int:
    """Return the first of a tenant's blocks with a lease until ``end`` or later; the null block if there is none."""
    rows, row, column = links_of(pool, BY_END)
    first, node = NULL_BLOCK, int(rows[row, column])
    while node != NULL_BLOCK:
        owner = tenant_of(pool, node)
        if owner < tenant or (owner == tenant and pool.leases[node] < end):
            node = int(rows[node, column + 1])
        else:
            first = node if owner == tenant else NULL_BLOCK
            node = int(rows[node, column])
    return first


@compiled
def last_of_tenant(pool: PoolArrays, tenant: int) -> int:
    """Return the tenant's block with the last end; the null block if there is none."""
    rows, row, column = links_of(pool, BY_END)
    last, node = NULL_BLOCK, int(rows[row, column])
    while node != NULL_BLOCK:
        owner = tenant_of(pool, node)
        if owner > tenant:
            node = int(rows[node, column])
        else:
            last = node if owner == tenant else last
            node = int(rows[node, column + 1])
    return last


@compiled
def last_child(pool: PoolArrays, parent: int) -> int:
    """Return the child with the last end; the null block if there is none."""
    records = pool.records
    rows, row, column = links_of(pool, BY_PARENT)
    last, node, life = NULL_BLOCK, int(rows[row, column]), records[parent, LIFE]
    while node != NULL_BLOCK:
        above = records[node, PARENT]
        if above > parent or (above == parent and records[node, PARENT_LIFE] > life):
            node = int(rows[node, column])
        else:
            last = node if above == parent and records[node, PARENT_LIFE] == life else last
            node = int(rows[node, column + 1])
    return last
