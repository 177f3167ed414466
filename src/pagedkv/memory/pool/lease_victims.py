"""Which leases end: those that are over, and the largest where nothing else is left to be handed out.

Leases meet tenants here: leased blocks are in order by their tenant, and of what each may give up.
"""

from pagedkv.memory.compilation.compiled import compiled
from pagedkv.memory.pool.block_record import stand_again, stand_aside
from pagedkv.memory.pool.blocks import NEXT, NULL_BLOCK, NUM_LEASED, RELEASED, PoolArrays
from pagedkv.memory.pool.lease_order import (
    add,
    has_unsettled,
    raise_parents,
    set_end,
    settle_all,
    take,
    take_from_below,
)
from pagedkv.memory.pool.leasing import HIGH, end_all, end_leased
from pagedkv.memory.pool.links import lead_to
from pagedkv.memory.pool.tenant_charges import ANY, num_tenants, tenant_may_give
from pagedkv.memory.pool.treap import BY_END, first_from, last_child, last_of_tenant, remove

__all__ = ["end_overdue", "give_largest_up"]


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
    end_all(pool, ended)


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
    end_leased(pool, oldest)


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
    end_all(pool, ended)
