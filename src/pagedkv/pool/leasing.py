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

Which leases end last and first, and what shares a block, :mod:`pagedkv.pool.lease_order` knows, so that all this costs
O(log leased blocks) for each block that bears the lease, however many there are.
"""

from typing import Final

import numpy as np

from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.pool import free_queue, moments
from pagedkv.pool.block_record import enter_free, leave_free, stamp_release, stand_again, stand_aside
from pagedkv.pool.blocks import (
    FREE,
    NEXT,
    NULL_BLOCK,
    NUM_LEASED,
    QUEUE,
    RELEASED,
    PoolArrays,
)
from pagedkv.pool.charging import ANY, IN_CACHED, IN_LEASED, join, leave, num_tenants, tenant_may_give
from pagedkv.pool.lease_order import (
    add,
    change_end,
    end_lease,
    has_unsettled,
    in_order_of_release,
    raise_parents,
    set_end,
    settle_all,
    stamp,
    take,
    take_from_below,
    unsettle_children,
)
from pagedkv.pool.links import lead_to
from pagedkv.pool.treap import BY_END, first_from, last_child, last_of_tenant, remove

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
    """Put a named block that nobody uses among the leased ones. O(log leased blocks)."""
    moments.note_drop(pool, block)
    stamp(pool, block)
    enter_free(pool.records, pool.counts, block)
    pool.counts[NUM_LEASED] += 1
    if len(pool.tenants):
        join(pool, block, IN_LEASED)
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
def _end(pool: PoolArrays, block: int) -> None:
    """Make a leased block, which was taken out of the order, one like other cached ones, as if it were released now."""
    _leave(pool, block)
    end_lease(pool, block)
    moments.note_name(pool, block)
    moments.enqueue(pool, block)
    if len(pool.tenants):
        leave(pool, block)
        join(pool, block, IN_CACHED)


@compiled
def _end_all(pool: PoolArrays, chain: int) -> None:
    """End the leases of linked blocks in the order of their release."""
    block = in_order_of_release(pool, chain)
    while block != NULL_BLOCK:
        following = int(pool.records[block, NEXT])
        _end(pool, block)
        block = following


@compiled
def give_largest_up(pool: PoolArrays, scope: int) -> None:
    """End the largest lease, since nothing else is left to be handed out; before, all that has high priority.

    What other leases share with it bears their end from now on; where that is all of it, the next one ends as well.
    O(log leased blocks) for each block that bears one of these, and O(tenants).

    ``scope``: which blocks may go; one of them is leased. Where all of them are shared with as large a lease of blocks
    that may not, the one goes all the same that was released first.
    """
    num_leased = pool.counts[NUM_LEASED]
    while pool.counts[NUM_LEASED] == num_leased:
        largest = _largest(pool, scope)
        _leave_to_others(pool, _take_largest(pool, scope))
        if scope != ANY and pool.counts[NUM_LEASED] == num_leased and _largest(pool, scope) == largest:
            _end_first(pool, largest, scope)


@compiled
def _largest(pool: PoolArrays, scope: int) -> float:
    """Tell when the largest lease ends of blocks that may go; high priority comes before all. O(tenants)."""
    largest = 0.0
    for tenant in range(num_tenants(pool)):
        if not tenant_may_give(pool, tenant, scope):
            continue
        last = last_of_tenant(pool, tenant)
        if last != NULL_BLOCK:
            if pool.leases[first_from(pool, tenant, 0.0)] == HIGH:
                return HIGH
            largest = max(largest, pool.leases[last])
    return largest


@compiled
def _take_largest(pool: PoolArrays, scope: int) -> int:
    """Take all that bear the largest lease out of the order; return them, linked by ``NEXT``.

    Where others share all of it, also what bears the next one, and so on, until one has a block that nothing leased
    continues: what they share goes with that, unless other leases keep it. Where that cannot be told beforehand, since
    a parent may not go with its children or is to bear their end first, only the largest.
    """
    chain = NULL_BLOCK
    is_told = scope == ANY and not has_unsettled(pool)
    while True:
        chain, has_tip = _take_class(pool, chain, _largest(pool, scope), scope)
        if has_tip or not is_told:
            return int(chain)


@compiled
def _take_class(pool: PoolArrays, chain: int, until: float, scope: int) -> tuple[int, bool]:
    """Take what bears one lease, and may go, out of the order; tell whether nothing leased continues some of it.

    It is put before others, which are linked by ``NEXT``.
    """
    rest, has_tip = chain, False
    for tenant in range(num_tenants(pool)):
        if not tenant_may_give(pool, tenant, scope):
            continue
        block = first_from(pool, tenant, until)
        while block != NULL_BLOCK and pool.leases[block] == until:
            remove(pool, BY_END, block)
            lead_to(pool.records, block, chain)
            chain = block
            has_tip |= last_child(pool, block) == NULL_BLOCK
            block = first_from(pool, tenant, until)
    block = chain
    while block != rest:
        take_from_below(pool, block)
        stand_aside(pool.records, block)
        set_end(pool, block, -until)
        block = int(pool.records[block, NEXT])
    return int(chain), has_tip


@compiled
def _leave_to_others(pool: PoolArrays, chain: int) -> None:
    """Give what was taken out of the order to the largest other leases that continue it, and end what is left."""
    settle_all(pool)
    block = chain
    while block != NULL_BLOCK:
        child = last_child(pool, block)
        if child != NULL_BLOCK:
            raise_parents(pool, child)
        block = int(pool.records[block, NEXT])
    ended = NULL_BLOCK
    while chain != NULL_BLOCK:
        following = int(pool.records[chain, NEXT])
        stand_again(pool.records, chain)
        if pool.leases[chain] < 0:
            lead_to(pool.records, chain, ended)
            ended = chain
        else:
            add(pool, chain)
        chain = following
    _end_all(pool, ended)


@compiled
def _end_first(pool: PoolArrays, until: float, scope: int) -> None:
    """End one lease of a block that may go: of those that end at one time, the one released first."""
    oldest = NULL_BLOCK
    for tenant in range(num_tenants(pool)):
        if tenant_may_give(pool, tenant, scope):
            block = first_from(pool, tenant, until)
            is_one = block != NULL_BLOCK and pool.leases[block] == until
            if is_one and (oldest == NULL_BLOCK or pool.records[block, RELEASED] < pool.records[oldest, RELEASED]):
                oldest = block
    take(pool, oldest)
    _end(pool, oldest)


@compiled
def end_overdue(pool: PoolArrays, now: float) -> None:
    """Set the clock, and end the leases of free blocks that have ended by then, in the order of their release.

    O(log leased blocks) for each of them, and O(tenants).
    """
    set_end(pool, NULL_BLOCK, now)
    ended = NULL_BLOCK
    for tenant in range(num_tenants(pool)):
        block = first_from(pool, tenant, 2 * HIGH)
        while block != NULL_BLOCK and pool.leases[block] <= now:
            take(pool, block)
            lead_to(pool.records, block, ended)
            ended = block
            block = first_from(pool, tenant, 2 * HIGH)
    _end_all(pool, ended)


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
        if len(pool.tenants):
            leave(pool, block)
        set_end(pool, block, until)
        enqueue_leased(pool, block)
    if before == 0 and pool.counts[NUM_LEASED]:
        unsettle_children(pool, block)
