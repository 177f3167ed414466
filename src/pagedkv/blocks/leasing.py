"""Leases: cached content that is evicted last, until a time that callers set.

A lease is soft. It does not prevent the allocation of a block, so a caller that was granted a free block gets it; but
as long as there is any other free block, leased blocks stay cached::

    allocated:   without content | spare | cached, in the eviction policy's order | leased, the largest first

``PoolArrays.leases`` contains the end of each block's lease in seconds of the space's clock, 0 without a lease; the
null block's entry is the clock. Content of high priority has the smallest positive number: it is evicted before leases,
and its lease never ends by itself. Free leased blocks have an order of their own. They are excluded from the eviction
policy, like spare ones: it is called as if the name were dropped, and set again when the lease ends or the block is
hit. A block that is in use or deferred only stores the number, which takes effect when it becomes free.

The *largest* lease is the one that ends last. It is ended first, so that the content which is expected back last is
lost first. A lease covers the whole prefix of its content, so a block that several leases share stores
the latest of their ends. When that lease ends early, the others keep the blocks that they need::

    30 -- 30 -- 30 -- 30                             20 -- 20    both end
           +--- 20 -- 20     once 30 is ended:              +--- 20 -- 20

The order below finds the leases that end first and last and the blocks that they share, so that all this costs
 O(log leased blocks) for each block of the lease, whatever the number of leases.

A free leased block is in two orders (:mod:`pagedkv.blocks.treap`): by end, to find the leases that end first and
last, and below its parent, to find the leased blocks that share a prefix. Usually a parent's lease ends no earlier than
those of its children, or the parent has none. This does not hold at all times, as a parent's lease may be newer, or a
window may have moved on. A child with a later end than its parent is unsettled, and is in a list instead of below
its parent until :func:`settle_all`::

    lease_links    of a block below its parent: before, after      of an unsettled one: previous, next
                   row of the null block: the root of that order | the first unsettled block
"""

from typing import Final

from pagedkv.blocks import cached_bounds, free_queue, tenant_charges
from pagedkv.blocks.eviction import policy
from pagedkv.blocks.free_queue import enter_free, is_leased, leave_free
from pagedkv.blocks.record import (
    FREE,
    HIGH_PRIORITY,
    LIFE,
    NEXT,
    NULL_BLOCK,
    NUM_LEASED,
    NUM_RELEASED,
    NUM_SENTINELS,
    PARENT,
    PARENT_LIFE,
    QUEUE,
    RELEASED,
    PoolArrays,
)
from pagedkv.blocks.treap import BY_END, BY_PARENT, has, insert, is_heap_at, last_child, remove, root_of
from pagedkv.compilation.compiled import compiled, featured, inlined


@featured
@inlined
def is_due(pool: PoolArrays, block: int) -> bool:
    """Whether a block's lease has ended."""
    return bool(HIGH_PRIORITY < pool.leases[block] <= pool.leases[NULL_BLOCK])


@featured
@compiled
def enqueue_leased(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced named block among the leased ones. O(log leased blocks)."""
    policy.note_drop(pool, block)
    stamp(pool, block)
    enter_free(pool.records, pool.counts, block)
    pool.counts[NUM_LEASED] += 1
    add(pool, block)


@inlined
def unlink_named(pool: PoolArrays, block: int) -> None:
    """Take a free named block, with its lease, out of the free ones. O(1), a leased one O(log leased blocks)."""
    if len(pool.bounds):
        cached_bounds.leave(pool, block)
    if is_leased(pool, block):
        _unlink_leased(pool, block)
    else:
        free_queue.remove(pool.records, pool.counts, block)


@featured
@compiled
def _unlink_leased(pool: PoolArrays, block: int) -> None:
    take(pool, block)
    _leave(pool, block)


@inlined
def _leave(pool: PoolArrays, block: int) -> None:
    """Mark a block that was taken out of the order of leased blocks as no longer free."""
    leave_free(pool.records, pool.counts, block)
    pool.records[block, RELEASED] = 0  # clears HOLD_STEP too: no step holds it
    pool.counts[NUM_LEASED] -= 1


@compiled
def end_leased(pool: PoolArrays, block: int) -> None:
    """Make a leased block that was taken out of the order an ordinary cached one, as if it were released now."""
    _leave(pool, block)
    pool.leases[block] = 0
    policy.note_name(pool, block)
    policy.enqueue(pool, block)
    if len(pool.tenants):
        tenant_charges.leave(pool, block)
        tenant_charges.join(pool, block)


@compiled
def end_all(pool: PoolArrays, chain: int) -> None:
    """End the leases of linked blocks in the order of their release."""
    block = in_order_of_release(pool, chain)
    while block != NULL_BLOCK:
        following = int(pool.records[block, NEXT])
        end_leased(pool, block)
        block = following


@compiled
def lease(pool: PoolArrays, block: int, until: float) -> None:
    """Keep a named block that is not spare at least until a time. O(log leased blocks)."""
    before = pool.leases[block]
    if until <= before:
        return
    if pool.records[block, QUEUE] != FREE:
        pool.leases[block] = until
    elif before > 0:
        change_end(pool, block, until)
    else:
        free_queue.remove(pool.records, pool.counts, block)
        pool.leases[block] = until
        enqueue_leased(pool, block)
        if len(pool.tenants):
            tenant_charges.leave(pool, block)
            tenant_charges.join(pool, block)
    if before == 0 and pool.counts[NUM_LEASED]:
        unsettle_children(pool, block)


PREVIOUS_UNSETTLED: Final = 0
NEXT_UNSETTLED: Final = 1
LAST_RELEASE: Final = 2**31 - 2


@compiled
def stamp(pool: PoolArrays, block: int) -> None:
    """Number the release of a block that becomes free now. O(1), once in 2^31 times O(blocks log blocks)."""
    if pool.counts[NUM_RELEASED] >= LAST_RELEASE:
        _renumber(pool)
    pool.counts[NUM_RELEASED] += 1
    pool.records[block, RELEASED] = pool.counts[NUM_RELEASED]


@compiled
def _renumber(pool: PoolArrays) -> None:
    """Number releases from 1 again, in the same order."""
    chain = NULL_BLOCK
    for block in range(1, len(pool.leases)):
        if pool.records[block, QUEUE] == FREE and pool.leases[block] > 0:
            remove(pool, BY_END, block)
            pool.records[block, NEXT] = chain
            chain = block
    chain = in_order_of_release(pool, chain)
    pool.counts[NUM_RELEASED] = 0
    while chain != NULL_BLOCK:
        following = int(pool.records[chain, NEXT])
        pool.counts[NUM_RELEASED] += 1
        pool.records[chain, RELEASED] = pool.counts[NUM_RELEASED]
        insert(pool, BY_END, chain)
        chain = following


@compiled
def in_order_of_release(pool: PoolArrays, chain: int) -> int:
    """Sort a chain (linked by ``NEXT``) of blocks that are in no order, by their release; return the first block.

    Merges sorted runs: O(blocks) if the chain is one run, else O(blocks log blocks).
    """
    records = pool.records
    while True:
        rest, last, num_runs, first = chain, NULL_BLOCK, 0, NULL_BLOCK
        while rest != NULL_BLOCK:
            left = rest
            right = _cut_run(pool, left)
            rest = _cut_run(pool, right) if right != NULL_BLOCK else NULL_BLOCK
            num_runs += 1
            while left != NULL_BLOCK or right != NULL_BLOCK:
                takes_left = right == NULL_BLOCK or (
                    left != NULL_BLOCK and records[left, RELEASED] < records[right, RELEASED]
                )
                block = left if takes_left else right
                if takes_left:
                    left = int(records[left, NEXT])
                else:
                    right = int(records[right, NEXT])
                if last == NULL_BLOCK:
                    first = block
                else:
                    records[last, NEXT] = block
                last = block
        if last != NULL_BLOCK:
            records[last, NEXT] = NULL_BLOCK
        chain = first
        if num_runs <= 1:
            return int(chain)


@compiled
def _cut_run(pool: PoolArrays, block: int) -> int:
    """Cut a chain after the sorted run that begins with a block; return the rest."""
    records = pool.records
    following = int(records[block, NEXT])
    while following != NULL_BLOCK and records[block, RELEASED] < records[following, RELEASED]:
        block, following = following, int(records[following, NEXT])
    records[block, NEXT] = NULL_BLOCK
    return following


@inlined
def _live_parent(pool: PoolArrays, block: int) -> int:
    """Return the parent of a named block if it still has the content of that time; else the null block."""
    parent = int(pool.records[block, PARENT])
    is_alive = pool.records[parent, LIFE] == pool.records[block, PARENT_LIFE]
    return parent if is_alive else NULL_BLOCK


@inlined
def _outlasts_parent(pool: PoolArrays, block: int) -> bool:
    """Whether a block's parent is leased too, and its lease ends earlier."""
    parent = _live_parent(pool, block)
    return bool(parent != NULL_BLOCK and 0 < pool.leases[parent] < pool.leases[block])


@compiled
def add(pool: PoolArrays, block: int) -> None:
    """Put a newly freed leased block with a numbered release into both orders. O(log leased blocks)."""
    insert(pool, BY_END, block)
    move_below(pool, block)


@compiled
def move_below(pool: PoolArrays, block: int) -> None:
    """Put a block below its parent, or among the unsettled blocks if its lease ends later than the parent's."""
    if not _outlasts_parent(pool, block):
        insert(pool, BY_PARENT, block)
        return
    links = pool.lease_links
    first = int(links[NULL_BLOCK, NEXT_UNSETTLED])
    links[block, PREVIOUS_UNSETTLED] = NULL_BLOCK
    links[block, NEXT_UNSETTLED] = first
    links[NULL_BLOCK, NEXT_UNSETTLED] = block
    if first != NULL_BLOCK:
        links[first, PREVIOUS_UNSETTLED] = block


@compiled
def take(pool: PoolArrays, block: int) -> None:
    """Remove a block from both orders. O(log leased blocks)."""
    remove(pool, BY_END, block)
    take_from_below(pool, block)


@compiled
def take_from_below(pool: PoolArrays, block: int) -> None:
    """Remove a block from below its parent, or from the unsettled blocks."""
    if not has_unsettled(pool) or has(pool, BY_PARENT, block):
        remove(pool, BY_PARENT, block)
        return
    links = pool.lease_links
    previous, following = int(links[block, PREVIOUS_UNSETTLED]), int(links[block, NEXT_UNSETTLED])
    links[previous, NEXT_UNSETTLED] = following  # the null block's link if the block was the first
    if following != NULL_BLOCK:
        links[following, PREVIOUS_UNSETTLED] = previous


@compiled
def change_end(pool: PoolArrays, block: int, until: float) -> None:
    """Change the end of a free block's lease."""
    take(pool, block)
    pool.leases[block] = until
    add(pool, block)


@compiled
def unsettle_children(pool: PoolArrays, parent: int) -> None:
    """Move the children with a later end than a newly leased block to the unsettled ones."""
    child = last_child(pool, parent)
    while child != NULL_BLOCK and pool.leases[child] > pool.leases[parent]:
        remove(pool, BY_PARENT, child)
        move_below(pool, child)
        child = last_child(pool, parent)


@inlined
def has_unsettled(pool: PoolArrays) -> bool:
    """Whether there are unsettled blocks, including blocks that no longer outlast their parents."""
    return bool(pool.lease_links[NULL_BLOCK, NEXT_UNSETTLED] != NULL_BLOCK)


@compiled
def settle_all(pool: PoolArrays) -> None:
    """Raise the end of every leased parent of an unsettled block to the block's own, and put the block below it."""
    block = int(pool.lease_links[NULL_BLOCK, NEXT_UNSETTLED])
    while block != NULL_BLOCK:
        take_from_below(pool, block)
        raise_parents(pool, block)
        move_below(pool, block)
        block = int(pool.lease_links[NULL_BLOCK, NEXT_UNSETTLED])


@compiled
def raise_parents(pool: PoolArrays, block: int) -> None:
    """Raise the ends of a block's leased ancestors to its own, until one is not leased or ends no earlier."""
    end = pool.leases[block]
    parent = _live_parent(pool, block)
    while parent != NULL_BLOCK and pool.leases[parent] != 0 and pool.leases[parent] < end:
        if pool.records[parent, QUEUE] == FREE:
            change_end(pool, parent, end)
        else:
            pool.leases[parent] = end
        parent = _live_parent(pool, parent)


@compiled
def first_misplaced(pool: PoolArrays) -> int:
    """Find a free leased block that is at a wrong place; the null block if there is none. O(log) for each block."""
    if len(pool.leases) == 0:
        return NULL_BLOCK
    for order in (BY_END, BY_PARENT):
        root = root_of(pool, order)
        if root != NULL_BLOCK and not (pool.leases[root] > 0 and pool.records[root, QUEUE] == FREE):
            return root
    num_unsettled = _num_unsettled(pool)
    for block in range(1, min(len(pool.leases), len(pool.records) - NUM_SENTINELS)):
        if pool.records[block, QUEUE] != FREE or not pool.leases[block] > 0:
            continue
        if not has(pool, BY_END, block) or not is_heap_at(pool, BY_END, block):
            return block
        if has(pool, BY_PARENT, block):
            if not is_heap_at(pool, BY_PARENT, block) or _outlasts_parent(pool, block):
                return block
        else:
            num_unsettled -= 1
    return NULL_BLOCK if num_unsettled == 0 else len(pool.records)


@compiled
def _num_unsettled(pool: PoolArrays) -> int:
    """Count the unsettled blocks; -1 if one is wrongly linked or is not a free leased block."""
    num_unsettled, previous, block = 0, NULL_BLOCK, int(pool.lease_links[NULL_BLOCK, NEXT_UNSETTLED])
    while block != NULL_BLOCK:
        is_leased = pool.leases[block] > 0 and pool.records[block, QUEUE] == FREE
        if not is_leased or pool.lease_links[block, PREVIOUS_UNSETTLED] != previous or has(pool, BY_PARENT, block):
            return -1
        num_unsettled += 1
        previous, block = block, int(pool.lease_links[block, NEXT_UNSETTLED])
    return num_unsettled
