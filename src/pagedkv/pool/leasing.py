"""Leases: cached content that goes last, until a time that its callers have named.

A lease is soft. It keeps no block from being handed out, so that whoever is promised a free block gets it; but while
there is any other, leased blocks stay::

    handed out:  without content | spare | cached, as the eviction policy says | leased, the largest first

``PoolArrays.leases`` says until when, in seconds of the space's clock, 0 where there is no lease; the null block's is
the clock. Content of high priority has the smallest number there is: it goes before leases, and never ends by itself. A
free block with a lease stands in a list of its own and is none of the policy's, like a spare one: to it, the name was
dropped, and begins anew when the lease ends or somebody hits the block. A block in use, or deferred, only bears the
number, and is looked at when it becomes free.

The *largest* lease is the one that ends last: who is to come back last waits for it in vain first. A lease covers all
that its content continues, so what several leases share bears the latest of their ends; when that one is given up, the
others keep what they need.
"""

from typing import Final

import numpy as np

from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.pool import free_queue
from pagedkv.pool.blocks import (
    FREE,
    LIFE,
    NEXT,
    NULL_BLOCK,
    NUM_FREE,
    NUM_LEASED,
    PARENT,
    PARENT_LIFE,
    QUEUE,
    PoolArrays,
)
from pagedkv.pool.charging import IN_CACHED, IN_LEASED, join, leave, may_go
from pagedkv.pool.eviction import hooks

__all__ = ["HIGH", "end_overdue", "enqueue_leased", "give_largest_up", "is_due", "is_leased", "lease", "unlink_leased"]

HIGH: Final = float(np.finfo(np.float64).tiny)


@inlined
def is_leased(pool: PoolArrays, block: int) -> bool:
    """Tell whether a block bears a lease, or high priority."""
    return len(pool.leases) > 0 and bool(pool.leases[block] > 0)


@inlined
def is_due(pool: PoolArrays, block: int) -> bool:
    """Tell whether a block's lease has ended."""
    return bool(HIGH < pool.leases[block] <= pool.leases[NULL_BLOCK])


@compiled
def enqueue_leased(pool: PoolArrays, block: int) -> None:
    """Put a named block that nobody uses among the leased ones."""
    hooks.note_drop(pool, block)
    free_queue.link_before(pool.records, free_queue.leased_sentinel(pool.records), block)
    pool.records[block, QUEUE] = FREE
    pool.counts[NUM_FREE] += 1
    pool.counts[NUM_LEASED] += 1
    if len(pool.tenants):
        join(pool, block, IN_LEASED)


@inlined
def unlink_leased(pool: PoolArrays, block: int) -> None:
    """Tell the policy of a leased block that leaves its list; the caller takes it from the free ones."""
    pool.counts[NUM_LEASED] -= 1
    hooks.note_name(pool, block)


@compiled
def _end(pool: PoolArrays, block: int) -> None:
    """Make a free leased block one like other cached ones, as if it were released now."""
    unlink_leased(pool, block)
    free_queue.remove(pool.records, pool.counts, block)
    pool.leases[block] = 0
    hooks.enqueue(pool, block)
    if len(pool.tenants):
        leave(pool, block)
        join(pool, block, IN_CACHED)


@compiled
def _end_up_to(pool: PoolArrays, least: float, most: float) -> None:
    """End the leases of free blocks that end in ``[least, most]``, in the order of their release."""
    sentinel = free_queue.leased_sentinel(pool.records)
    block = pool.records[sentinel, NEXT]
    while block != sentinel:
        following = pool.records[block, NEXT]
        if least <= pool.leases[block] <= most:
            _end(pool, block)
        block = following


@compiled
def give_largest_up(pool: PoolArrays, scope: int) -> None:
    """End the largest lease, since nothing else is left to be handed out; before, all that has high priority.

    What other leases share with it bears their end from now on; where that is all of it, the next one ends as well.
    O(leased blocks), once more for each lease that is all shared.

    ``scope``: which blocks may go; one of them is leased. Where all of them are shared with as large a lease of blocks
    that may not, the one goes all the same that was released first.
    """
    num_leased = pool.counts[NUM_LEASED]
    while pool.counts[NUM_LEASED] == num_leased:
        largest = _largest(pool, scope)
        _leave_to_others(pool, largest, scope)
        _end_up_to(pool, -largest, -largest)
        if scope and pool.counts[NUM_LEASED] == num_leased and _largest(pool, scope) == largest:
            _end_first(pool, largest, scope)


@compiled
def _largest(pool: PoolArrays, scope: int) -> float:
    """Tell when the largest lease ends of blocks that may go; high priority comes before all."""
    sentinel = free_queue.leased_sentinel(pool.records)
    block = pool.records[sentinel, NEXT]
    largest = 0.0
    has_priority = False
    while block != sentinel:
        if may_go(pool, block, scope):
            largest = max(largest, pool.leases[block])
            has_priority |= pool.leases[block] == HIGH
        block = pool.records[block, NEXT]
    return HIGH if has_priority else largest


@compiled
def _end_first(pool: PoolArrays, until: float, scope: int) -> None:
    """End one lease of a block that may go: of those that end at one time, the one released first."""
    block = pool.records[free_queue.leased_sentinel(pool.records), NEXT]
    while pool.leases[block] != until or not may_go(pool, block, scope):
        block = pool.records[block, NEXT]
    _end(pool, block)


@compiled
def _leave_to_others(pool: PoolArrays, until: float, scope: int) -> None:
    """Give the free blocks of one lease to the largest others that continue them; negate the end of what is left."""
    sentinel = free_queue.leased_sentinel(pool.records)
    block = pool.records[sentinel, NEXT]
    while block != sentinel:
        if pool.leases[block] == until and may_go(pool, block, scope):
            pool.leases[block] = -until
        block = pool.records[block, NEXT]
    block = pool.records[sentinel, NEXT]
    while block != sentinel:
        end, follower = pool.leases[block], block
        while end > 0:
            parent = pool.records[follower, PARENT]
            if parent == NULL_BLOCK or pool.records[parent, LIFE] != pool.records[follower, PARENT_LIFE]:
                break
            if pool.leases[parent] >= end or pool.leases[parent] == 0:
                break
            pool.leases[parent] = end
            follower = parent
        block = pool.records[block, NEXT]


@compiled
def end_overdue(pool: PoolArrays, now: float) -> None:
    """Set the clock, and end the leases of free blocks that have ended by then. O(leased blocks)."""
    pool.leases[NULL_BLOCK] = now
    if pool.counts[NUM_LEASED]:
        _end_up_to(pool, 2 * HIGH, now)


@compiled
def lease(pool: PoolArrays, block: int, until: float) -> None:
    """Keep a named block that is not spare until a time, or longer if it is kept for longer."""
    was_leased = is_leased(pool, block)
    pool.leases[block] = max(pool.leases[block], until)
    if pool.records[block, QUEUE] == FREE and not was_leased:
        free_queue.remove(pool.records, pool.counts, block)
        if len(pool.tenants):
            leave(pool, block)
        enqueue_leased(pool, block)
