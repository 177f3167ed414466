"""Ordered sets of a pool's blocks whose links lie in the blocks' own rows: insert, remove and look up in O(log blocks).

A treap (Seidel and Aragon, "Randomized Search Trees", 1996): a binary search tree by what the blocks are ordered by,
and a heap by a number of each block that looks random. Here that number is the block's id, mixed, so that a tree has
the same shape in every process; nobody chooses which ids it gets. Its two links a block, to what comes before and after
it below, lie beside each other in a row of the block; 0, the null block, is none. The root is where the first of two
such links leads that are no member's. All is reached by walking down from there, so there is no link upward.

Two orders are known, both for blocks that nobody uses and that are leased (:mod:`pagedkv.memory.pool.leasing`)::

    BY_END       the tenant that is charged | the end of the lease | when the block was released
    BY_PARENT    the parent, in its life    | the end of the lease | the block's id
"""

from typing import Final, NamedTuple

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import (
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
from pagedkv.memory.pool.links import set_branch

__all__ = [
    "BY_END",
    "BY_PARENT",
    "first_from",
    "has",
    "insert",
    "is_heap_at",
    "last_child",
    "last_of_tenant",
    "remove",
    "root_of",
    "tenant_of",
]

BY_END: Final = 0
BY_PARENT: Final = 1
HEAP_SPREAD: Final = 0x9E3779B1
HEAP_MASK: Final = 2**32 - 1


class Links(NamedTuple):
    """Where the links of an order lie.

    Args:
        rows: int32 ``[any, any]``, a row for each block, and one for the root.
        root: number of the row whose link leads to the root.
        column: the link to what comes before; that to what comes after is the next column.
    """

    rows: Int32Array
    root: int
    column: int


@inlined
def links_of(pool: PoolArrays, order: int) -> Links:
    """Tell where the links of an order lie."""
    if order == BY_END:
        return Links(pool.records, len(pool.records) - NUM_SENTINELS + LEASED_ROOT, NEXT)
    return Links(pool.lease_links, NULL_BLOCK, 0)


@inlined
def tenant_of(pool: PoolArrays, block: int) -> int:
    """Tell whom a block is charged to; 0 where there are no tenants."""
    return int(pool.tenants[block, CHARGED]) if len(pool.tenants) else 0


@inlined
def height_of(block: int) -> int:
    """Mix a block's id: of two blocks the one with the greater number is nearer to the root. No two have the same."""
    mixed = (int(block) * HEAP_SPREAD) & HEAP_MASK
    mixed = ((mixed ^ (mixed >> 15)) * HEAP_SPREAD) & HEAP_MASK
    return mixed ^ (mixed >> 15)


@inlined
def precedes(pool: PoolArrays, order: int, block: int, other: int) -> bool:
    """Tell whether a block comes before another one in an order."""
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
    """Add a block that is not in an order yet."""
    rows, row, column = links_of(pool, order)
    link = column
    height = height_of(block)
    node = int(rows[row, link])
    while node != NULL_BLOCK and height_of(node) > height:
        row, link = node, column if precedes(pool, order, block, node) else column + 1
        node = int(rows[row, link])
    set_branch(rows, row, link, block)
    before, before_link, after, after_link = block, column, block, column + 1
    while node != NULL_BLOCK:  # split what was there, by the block
        if precedes(pool, order, node, block):
            set_branch(rows, before, before_link, node)
            before, before_link = node, column + 1
            node = int(rows[before, before_link])
        else:
            set_branch(rows, after, after_link, node)
            after, after_link = node, column
            node = int(rows[after, after_link])
    set_branch(rows, before, before_link, NULL_BLOCK)
    set_branch(rows, after, after_link, NULL_BLOCK)


@compiled
def remove(pool: PoolArrays, order: int, block: int) -> None:
    """Take a block out of an order that it is in; what it is ordered by is as it was when it was added."""
    rows, row, column = links_of(pool, order)
    link = column
    while rows[row, link] != block:
        row, link = int(rows[row, link]), column if precedes(pool, order, block, int(rows[row, link])) else column + 1
    before, after = int(rows[block, column]), int(rows[block, column + 1])
    while before and after:  # join what was below it
        if height_of(before) > height_of(after):
            set_branch(rows, row, link, before)
            row, link = before, column + 1
            before = int(rows[row, link])
        else:
            set_branch(rows, row, link, after)
            row, link = after, column
            after = int(rows[row, link])
    set_branch(rows, row, link, before + after)  # one of them is the null block


@compiled
def has(pool: PoolArrays, order: int, block: int) -> bool:
    """Tell whether a block is in an order."""
    rows, row, column = links_of(pool, order)
    node = int(rows[row, column])
    while node and node != block:
        node = int(rows[node, column if precedes(pool, order, block, node) else column + 1])
    return node == block


@inlined
def root_of(pool: PoolArrays, order: int) -> int:
    """Name the block at the root of an order; the null block if it is empty."""
    rows, row, column = links_of(pool, order)
    return int(rows[row, column])


@inlined
def is_heap_at(pool: PoolArrays, order: int, block: int) -> bool:
    """Tell whether what is right below a member of an order is lower, and leased and free as it is. For ``check()``."""
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
    """Name the first block by end of all that are charged to a tenant and end then or later; the null block if none."""
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
    """Name the last block by end of all that are charged to a tenant; the null block if there is none."""
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
    """Name the block with the largest end of all that continue what a block holds; the null block if there is none."""
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
