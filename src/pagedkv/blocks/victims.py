"""The choice of victims under caps, floors and leases: which cached block is evicted so that a tenant can allocate one.

If no cap or floor is in the way, the eviction policy decides as without tenants. A tenant at its cap loses its own
cached blocks, and blocks that a floor guarantees are not evicted for other tenants::

    at its cap       own spare blocks | own cached ones | own leased ones, the largest lease first
    else             without content | spare | the policy's choice | leased, the largest first; of these are evictable:
                     its own blocks, and those of tenants that are charged for more than their floors

If the policy's choice is not evictable, the evictable block that was released first is evicted instead, whatever the
policy (of one sequence the tail before the head). This examines the first block of each tenant's list, O(tenants); at a
cap it is O(1). With LRU both are exactly the order of the cold list. Ending a lease costs the amount given in
:mod:`pagedkv.blocks.leasing`, and O(tenants).

Leases end here, when they are over or if no other block can be allocated, since leases and tenants combine: leased
blocks are ordered by tenant, and some tenants' blocks are not evictable.

Blocks can also be evicted ahead of any allocation, in the same order (:func:`evict_cached`).
"""

from pagedkv.blocks import free_queue
from pagedkv.blocks.eviction import policy
from pagedkv.blocks.leasing import (
    add,
    end_all,
    end_leased,
    has_unsettled,
    raise_parents,
    settle_all,
    take,
    take_from_below,
    unlink_named,
)
from pagedkv.blocks.prefix_index import lose_content
from pagedkv.blocks.record import (
    CHARGED,
    FREE,
    HIGH_PRIORITY,
    IN_USE,
    NAME,
    NEXT,
    NO_TENANT,
    NULL_BLOCK,
    NUM_CACHED,
    NUM_LEASED,
    NUM_SENTINELS,
    QUEUE,
    RELEASED,
    PoolArrays,
)
from pagedkv.blocks.tenant_charges import (
    AFTER,
    ANY,
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
    is_tenant_evictable,
    leave,
    list_of,
    num_charged,
    num_tenants,
)
from pagedkv.blocks.treap import BY_END, first_from, last_child, last_of_tenant, remove
from pagedkv.compilation.compiled import compiled, featured, inlined, unsigned


@featured
@compiled
def make_room(pool: PoolArrays) -> None:
    """Ensure that the current tenant's cap has room for a block, and that the first free block has no content.

    The caller has checked that there is a block that the current tenant may allocate.
    """
    current = int(pool.tenants[NULL_BLOCK, CURRENT_TENANT])
    keep_cap(pool, current, 1)
    first = unsigned(pool.records[NULL_BLOCK, NEXT])
    if first == NULL_BLOCK or pool.records[first, NAME]:
        _evict(pool, _permitted_victim(pool, NULL_BLOCK))


@compiled
def evict_cached(pool: PoolArrays, num_blocks: int) -> int:
    """Evict so many cached blocks, in the order in which allocations would, and return how many were evicted.

    With tenants they are evicted as for the current one: blocks that the floors of others keep stay cached. If so many
    are not evictable, all that are evictable are evicted.
    """
    records, counts = pool.records, pool.counts
    num_cached = int(counts[NUM_CACHED])
    last = NULL_BLOCK  # of the free blocks without content, which come first
    while num_cached - counts[NUM_CACHED] < num_blocks and counts[NUM_CACHED]:
        while records[last, NEXT] != NULL_BLOCK and not records[records[last, NEXT], NAME]:
            last = int(records[last, NEXT])
        num_left = counts[NUM_CACHED]
        if len(pool.tenants):
            _evict_permitted(pool, last)
        else:
            _evict_any(pool, last)
        if counts[NUM_CACHED] == num_left:
            break
    return num_cached - int(counts[NUM_CACHED])


@featured
@compiled
def _evict_permitted(pool: PoolArrays, last: int) -> None:
    """Evict the first cached block that the current tenant may take, if there is any."""
    victim = _permitted_victim(pool, last)
    if victim != NULL_BLOCK:
        _evict(pool, victim)


@compiled
def _evict_any(pool: PoolArrays, last: int) -> None:
    """Evict the first cached block of a pool without tenants, which has one; the first leased one if all are leased."""
    records = pool.records
    if pool.counts[NUM_LEASED] and pool.counts[NUM_LEASED] == pool.counts[NUM_CACHED]:
        end_largest_lease(pool, ANY)
    block = unsigned(records[free_queue.spare_sentinel(records), NEXT])
    if block >= len(records) - NUM_SENTINELS:
        block = unsigned(policy.choose_victim(pool, _first_cached(pool, last)))
    unlink_named(pool, block)
    lose_content(pool, block)
    free_queue.prepend(records, pool.counts, block)


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
    unlink_named(pool, block)
    leave(pool, block)
    pool.tenants[block, CHARGED] = NO_TENANT
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
def _permitted_victim(pool: PoolArrays, last: int) -> int:
    """Return the block to evict for a current tenant below its cap; the null block if none is evictable.

    ``last``: the last free block without content; the null block if none is left.
    """
    victim = unsigned(_oldest_permitted(pool, IN_SPARE))  # of one type: Numba unites signed and unsigned as floats
    if victim == NULL_BLOCK:
        victim = unsigned(_choice_of_policy(pool, last))
    if victim == NULL_BLOCK:
        victim = unsigned(_oldest_permitted(pool, IN_CACHED))
    if victim == NULL_BLOCK and _largest(pool, PERMITTED):
        end_largest_lease(pool, PERMITTED)
        victim = unsigned(_oldest_permitted(pool, IN_CACHED))
    return victim


@compiled
def _choice_of_policy(pool: PoolArrays, last: int) -> int:
    """Return the eviction policy's choice if it is evictable; else the null block."""
    first = _first_cached(pool, last)
    if first >= list_of(pool, 0, 0):
        return unsigned(NULL_BLOCK)
    block = unsigned(policy.choose_victim(pool, first))
    return block if is_evictable(pool, block, PERMITTED) else unsigned(NULL_BLOCK)


@inlined
def _first_cached(pool: PoolArrays, last: int) -> int:
    """Return the first block in the order of the policy; a sentinel if there is none.

    ``last``: the last free block without content; the null block if none is left.
    """
    first = unsigned(pool.records[last, NEXT])
    if first == NULL_BLOCK:
        first = unsigned(pool.records[free_queue.protected_sentinel(pool.records), NEXT])
    return first


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


@featured
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
            pool.records[block, NEXT] = chain
            chain = block
            has_tip |= last_child(pool, block) == NULL_BLOCK
            block = first_from(pool, tenant, until)
    block = chain
    while block != rest:
        take_from_below(pool, block)
        pool.records[block, QUEUE] = IN_USE  # in no list for a moment; it still counts as free
        pool.leases[block] = -until
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
        pool.records[chain, QUEUE] = FREE
        if pool.leases[chain] < 0:
            pool.records[chain, NEXT] = ended
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
    pool.leases[NULL_BLOCK] = now
    ended = NULL_BLOCK
    for tenant in range(num_tenants(pool)):
        block = first_from(pool, tenant, 2 * HIGH_PRIORITY)
        while block != NULL_BLOCK and pool.leases[block] <= now:
            take(pool, block)
            pool.records[block, NEXT] = ended
            ended = block
            block = first_from(pool, tenant, 2 * HIGH_PRIORITY)
    end_all(pool, ended)
