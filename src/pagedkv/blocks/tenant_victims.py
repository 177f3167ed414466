"""Victims under caps and floors: the choice of the cached block that is evicted so that a tenant can allocate one.

If no cap or floor is in the way, the eviction policy decides as without tenants. A tenant at its cap loses its own
cached blocks, and blocks that a floor guarantees are not evicted for other tenants::

    at its cap       own spare blocks | own cached ones | own leased ones, the largest lease first
    else             without content | spare | the policy's choice | leased, the largest first; of these are evictable:
                     its own blocks, and those of tenants that are charged for more than their floors

If the policy's choice is not evictable, the evictable block that was released first is evicted instead, whatever the
policy (of one sequence the tail before the head). This examines the first block of each tenant's list, O(tenants); at a
cap it is O(1). With LRU both are exactly the order of the cold list. Ending a lease costs the amount given in
:mod:`pagedkv.blocks.leasing`, and O(tenants).
"""

from pagedkv.blocks import free_queue, moments
from pagedkv.blocks.blocks import NAME, NEXT, NULL_BLOCK, PoolArrays
from pagedkv.blocks.lease_victims import end_largest_lease
from pagedkv.blocks.life_cycle import lose_content
from pagedkv.blocks.tenant_charges import (
    AFTER,
    CAP,
    CLOCK,
    CLOCK_MASK,
    CURRENT_TENANT,
    IN_CACHED,
    IN_SPARE,
    OWN,
    PERMITTED,
    STAMP,
    account_of,
    is_evictable,
    leave,
    list_of,
    num_charged,
    num_tenants,
    uncharge,
)
from pagedkv.compilation.compiled import compiled, unsigned

__all__ = ["keep_cap", "make_room"]


@compiled
def make_room(pool: PoolArrays) -> None:
    """Ensure that the current tenant's cap has room for a block, and that the first free block has no content.

    The caller has checked that there is a block that the current tenant may allocate.
    """
    current = int(pool.tenants[NULL_BLOCK, CURRENT_TENANT])
    keep_cap(pool, current, 1)
    first = unsigned(pool.records[NULL_BLOCK, NEXT])
    if first == NULL_BLOCK or pool.records[first, NAME]:
        _evict(pool, _permitted_victim(pool))


@compiled
def keep_cap(pool: PoolArrays, tenant: int, num_more: int) -> None:
    """Evict cached blocks of a tenant, which is the current one, until its cap has room for ``num_more`` blocks."""
    cap = int(pool.tenants[account_of(pool, tenant), CAP])
    while num_charged(pool, tenant) + num_more > cap:
        _evict(pool, _own_victim(pool, tenant))


@compiled
def _evict(pool: PoolArrays, block: int) -> None:
    """Evict a cached block and insert it as the second block to be allocated, or as the first if there is none.

    The first place is left alone since a row that takes over a kept state has just put that state's block there.
    """
    records = pool.records
    moments.unlink(pool, block)
    leave(pool, block)
    uncharge(pool, block)
    lose_content(pool, block)
    place = unsigned(records[NULL_BLOCK, NEXT])
    if place != NULL_BLOCK and not records[place, NAME]:
        place = unsigned(records[place, NEXT])
    free_queue.insert_before(records, pool.counts, place, block)


@compiled
def _own_victim(pool: PoolArrays, tenant: int) -> int:
    """Return the block that a tenant loses for its own allocation; it has a cached one."""
    num_blocks = list_of(pool, 0, 0)
    for kind in (IN_SPARE, IN_CACHED):
        block = int(pool.tenants[list_of(pool, tenant, kind), AFTER])
        if block < num_blocks:
            return block
    end_largest_lease(pool, OWN)
    return int(pool.tenants[list_of(pool, tenant, IN_CACHED), AFTER])


@compiled
def _permitted_victim(pool: PoolArrays) -> int:
    """Return the block to evict for a current tenant below its cap, if no block without content is left."""
    victim = unsigned(_oldest_permitted(pool, IN_SPARE))  # of one type: Numba unites signed and unsigned as floats
    if victim == NULL_BLOCK:
        victim = unsigned(_choice_of_policy(pool))
    if victim == NULL_BLOCK:
        victim = unsigned(_oldest_permitted(pool, IN_CACHED))
    if victim == NULL_BLOCK:
        end_largest_lease(pool, PERMITTED)
        victim = unsigned(_oldest_permitted(pool, IN_CACHED))
    return victim


@compiled
def _choice_of_policy(pool: PoolArrays) -> int:
    """Return the eviction policy's choice if it is evictable; else the null block."""
    records = pool.records
    num_blocks = list_of(pool, 0, 0)
    first = int(records[NULL_BLOCK, NEXT])
    if first == NULL_BLOCK:
        first = int(records[free_queue.protected_sentinel(records), NEXT])
    if first >= num_blocks:
        return unsigned(NULL_BLOCK)
    block = unsigned(moments.choose_victim(pool, unsigned(first)))
    return block if is_evictable(pool, block, PERMITTED) else unsigned(NULL_BLOCK)


@compiled
def _oldest_permitted(pool: PoolArrays, kind: int) -> int:
    """Return the evictable block that was released first, of all lists of one kind; the null block if there is none.

    O(tenants).
    """
    tenants = pool.tenants
    num_blocks = list_of(pool, 0, 0)
    now = int(tenants[NULL_BLOCK, CLOCK])
    oldest, greatest_age = NULL_BLOCK, -1
    for tenant in range(num_tenants(pool)):
        block = int(tenants[list_of(pool, tenant, kind), AFTER])
        if block >= num_blocks or not is_evictable(pool, block, PERMITTED):
            continue
        age = (now - int(tenants[block, STAMP])) & CLOCK_MASK
        if age > greatest_age:
            oldest, greatest_age = block, age
    return oldest
