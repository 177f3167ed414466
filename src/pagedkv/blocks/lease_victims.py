"""The leases that end: those that are over, and the largest one if no other block can be allocated.

Leases and tenants are combined here: leased blocks are ordered by tenant, and some tenants' blocks are not evictable.
"""

from pagedkv.blocks.block_record import stand_again, stand_aside
from pagedkv.blocks.blocks import HIGH_PRIORITY, NEXT, NULL_BLOCK, NUM_LEASED, RELEASED, PoolArrays
from pagedkv.blocks.lease_order import (
    add,
    has_unsettled,
    raise_parents,
    set_end,
    settle_all,
    take,
    take_from_below,
)
from pagedkv.blocks.leasing import end_all, end_leased
from pagedkv.blocks.links import lead_to
from pagedkv.blocks.tenant_charges import ANY, is_tenant_evictable, num_tenants
from pagedkv.blocks.treap import BY_END, first_from, last_child, last_of_tenant, remove
from pagedkv.compilation.compiled import compiled

__all__ = ["end_largest_lease", "end_overdue"]


@compiled
def end_largest_lease(pool: PoolArrays, scope: int) -> None:
    """End the largest lease, since no other free block is left; before any lease, high priority ends.

    Blocks that this lease shares with other leases get the largest of their ends. If it shares all of its blocks, the
    next largest ends as well. O(log leased blocks) for each block of these leases, and O(tenants).

    ``scope``: which blocks are evictable; at least one of them is leased. If each of them is shared with an equally
    large lease of blocks that are not evictable, the one that was released first loses its lease all the same.
    """
    num_leased = pool.counts[NUM_LEASED]
    while pool.counts[NUM_LEASED] == num_leased:
        largest = _largest(pool, scope)
        _leave_to_others(pool, _take_largest(pool, scope))
        if scope != ANY and pool.counts[NUM_LEASED] == num_leased and _largest(pool, scope) == largest:
            _end_first(pool, largest, scope)


@compiled
def _largest(pool: PoolArrays, scope: int) -> float:
    """Return the latest lease end of evictable blocks; HIGH_PRIORITY if any has that, as it ends first. O(tenants)."""
    largest = 0.0
    for tenant in range(num_tenants(pool)):
        if not is_tenant_evictable(pool, tenant, scope):
            continue
        last = last_of_tenant(pool, tenant)
        if last != NULL_BLOCK:
            if pool.leases[first_from(pool, tenant, 0.0)] == HIGH_PRIORITY:
                return HIGH_PRIORITY
            largest = max(largest, pool.leases[last])
    return largest


@compiled
def _take_largest(pool: PoolArrays, scope: int) -> int:
    """Take all blocks with the largest lease out of the order; return them as a chain, linked by ``NEXT``.

    If other leases share all of them, the blocks of the next largest lease are taken too, and so on, until one of these
    leases has a block without a leased child. Shared blocks lose the lease with it, unless other leases keep them. This
    cannot be decided in advance if some blocks are not evictable, or if unsettled children may raise a parent's end;
    then only the largest lease is taken.
    """
    chain = NULL_BLOCK
    is_certain = scope == ANY and not has_unsettled(pool)
    while True:
        chain, has_tip = _take_class(pool, chain, _largest(pool, scope), scope)
        if has_tip or not is_certain:
            return int(chain)


@compiled
def _take_class(pool: PoolArrays, chain: int, until: float, scope: int) -> tuple[int, bool]:
    """Take the evictable blocks with a lease until ``until`` out of the order, and put them in front of a chain.

    Returns the new chain, linked by ``NEXT``, and whether any of its new blocks has no leased child.
    """
    rest, has_tip = chain, False
    for tenant in range(num_tenants(pool)):
        if not is_tenant_evictable(pool, tenant, scope):
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
    """Give the blocks of a chain the largest end of their leased descendants; end the leases of those without any."""
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
    end_all(pool, ended)


@compiled
def _end_first(pool: PoolArrays, until: float, scope: int) -> None:
    """End the lease of one evictable block: of those with a lease until ``until``, the one that was released first."""
    oldest = NULL_BLOCK
    for tenant in range(num_tenants(pool)):
        if is_tenant_evictable(pool, tenant, scope):
            block = first_from(pool, tenant, until)
            is_one = block != NULL_BLOCK and pool.leases[block] == until
            if is_one and (oldest == NULL_BLOCK or pool.records[block, RELEASED] < pool.records[oldest, RELEASED]):
                oldest = block
    take(pool, oldest)
    end_leased(pool, oldest)


@compiled
def end_overdue(pool: PoolArrays, now: float) -> None:
    """Set the clock, and end the leases of free blocks that end by then, in the order of the blocks' release.

    O(log leased blocks) for each of them, and O(tenants).
    """
    set_end(pool, NULL_BLOCK, now)
    ended = NULL_BLOCK
    for tenant in range(num_tenants(pool)):
        block = first_from(pool, tenant, 2 * HIGH_PRIORITY)
        while block != NULL_BLOCK and pool.leases[block] <= now:
            take(pool, block)
            lead_to(pool.records, block, ended)
            ended = block
            block = first_from(pool, tenant, 2 * HIGH_PRIORITY)
    end_all(pool, ended)
