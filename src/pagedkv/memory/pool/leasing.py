"""Leases: cached content that goes last, until a time that its callers have named.

A lease is soft. It keeps no block from being handed out, so that whoever is promised a free block gets it; but while
there is any other, leased blocks stay::

    handed out:  without content | spare | cached, as the eviction policy says | leased, the largest first

``PoolArrays.leases`` says until when, in seconds of the space's clock, 0 where there is no lease; the null block's is
the clock. Content of high priority has the smallest number there is: it goes before leases, and never ends by itself. A
free block with a lease stands in an order of its own and is none of the policy's, like a spare one: to it, the name was
dropped, and begins anew when the lease ends or somebody hits the block. A block in use, or deferred, only bears the
number, and is looked at when it becomes free.

The *largest* lease is the one that ends last: who is to come back last waits for it in vain first. A lease covers all
that its content continues, so what several leases share bears the latest of their ends; when that one is given up, the
others keep what they need::

    30 -- 30 -- 30 -- 30                             20 -- 20    both end
           +--- 20 -- 20     once 30 is given up:           +--- 20 -- 20

Which leases end last and first, and what shares a block, :mod:`pagedkv.memory.pool.lease_order` knows, so that all this
costs O(log leased blocks) for each block that bears the lease, however many there are.
"""

from typing import Final

import numpy as np

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.pool import free_queue, moments
from pagedkv.memory.pool.block_record import enter_free, leave_free, stamp_release
from pagedkv.memory.pool.blocks import (
    FREE,
    NEXT,
    NULL_BLOCK,
    NUM_LEASED,
    QUEUE,
    PoolArrays,
)
from pagedkv.memory.pool.lease_order import (
    add,
    change_end,
    end_lease,
    in_order_of_release,
    set_end,
    stamp,
    take,
    unsettle_children,
)

__all__ = ["HIGH", "end_all", "end_leased", "enqueue_leased", "is_due", "is_leased", "lease", "unlink_leased"]

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
    """Put a named block that nobody uses among the leased ones. O(log leased blocks)."""
    moments.note_drop(pool, block)
    stamp(pool, block)
    enter_free(pool.records, pool.counts, block)
    pool.counts[NUM_LEASED] += 1
    add(pool, block)


@compiled
def unlink_leased(pool: PoolArrays, block: int) -> None:
    """Take a leased block, with what it bears, from the free ones. O(log leased blocks)."""
    take(pool, block)
    _leave(pool, block)


@inlined
def _leave(pool: PoolArrays, block: int) -> None:
    """Note that a block which was taken out of the order of leased ones is free no more."""
    leave_free(pool.records, pool.counts, block)
    stamp_release(pool.records, block, 0)  # and that no step holds it
    pool.counts[NUM_LEASED] -= 1


@compiled
def end_leased(pool: PoolArrays, block: int) -> None:
    """Make a leased block, which was taken out of the order, one like other cached ones, as if it were released now."""
    _leave(pool, block)
    end_lease(pool, block)
    moments.note_name(pool, block)
    moments.put(pool, block)
    moments.note_rank(pool, block)


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
    """Keep a named block that is not spare until a time, or longer if it is kept for longer. O(log leased blocks)."""
    before = pool.leases[block]
    if until <= before:
        return
    if pool.records[block, QUEUE] != FREE:
        set_end(pool, block, until)
    elif before > 0:
        change_end(pool, block, until)
    else:
        free_queue.remove(pool.records, pool.counts, block)
        set_end(pool, block, until)
        enqueue_leased(pool, block)
        moments.note_rank(pool, block)
    if before == 0 and pool.counts[NUM_LEASED]:
        unsettle_children(pool, block)
