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

:mod:`pagedkv.blocks.lease_order` finds the leases that end first and last and the blocks that they share, so that
all this costs O(log leased blocks) for each block of the lease, whatever the number of leases.
"""

from pagedkv.blocks import free_queue, moments
from pagedkv.blocks.block_record import enter_free, leave_free, stamp_release
from pagedkv.blocks.blocks import (
    FREE,
    HIGH_PRIORITY,
    NEXT,
    NULL_BLOCK,
    NUM_LEASED,
    QUEUE,
    PoolArrays,
)
from pagedkv.blocks.lease_order import (
    add,
    change_end,
    end_lease,
    in_order_of_release,
    set_end,
    stamp,
    take,
    unsettle_children,
)
from pagedkv.compilation.compiled import compiled, inlined

__all__ = ["end_all", "end_leased", "enqueue_leased", "is_due", "is_leased", "lease", "unlink_leased"]


@inlined
def is_leased(pool: PoolArrays, block: int) -> bool:
    """Whether a block has a lease or high priority."""
    return len(pool.leases) > 0 and bool(pool.leases[block] > 0)


@inlined
def is_due(pool: PoolArrays, block: int) -> bool:
    """Whether a block's lease has ended."""
    return bool(HIGH_PRIORITY < pool.leases[block] <= pool.leases[NULL_BLOCK])


@compiled
def enqueue_leased(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced named block among the leased ones. O(log leased blocks)."""
    moments.note_drop(pool, block)
    stamp(pool, block)
    enter_free(pool.records, pool.counts, block)
    pool.counts[NUM_LEASED] += 1
    add(pool, block)


@compiled
def unlink_leased(pool: PoolArrays, block: int) -> None:
    """Take a leased block, with its lease, out of the free ones. O(log leased blocks)."""
    take(pool, block)
    _leave(pool, block)


@inlined
def _leave(pool: PoolArrays, block: int) -> None:
    """Mark a block that was taken out of the order of leased blocks as no longer free."""
    leave_free(pool.records, pool.counts, block)
    stamp_release(pool.records, block, 0)  # clears HOLD_STEP too: no step holds it
    pool.counts[NUM_LEASED] -= 1


@compiled
def end_leased(pool: PoolArrays, block: int) -> None:
    """Make a leased block that was taken out of the order an ordinary cached one, as if it were released now."""
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
    """Keep a named block that is not spare at least until a time. O(log leased blocks)."""
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
