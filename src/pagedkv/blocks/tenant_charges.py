"""Accounts of tenants: to which tenant each block is charged, and which blocks each tenant has cached.

A block is charged to the tenant that takes it out of the free blocks, as a new block or by a hit of an unreferenced
one. It stays charged to that tenant while it is in use, deferred, and cached afterwards, even if other tenants share
it. The charge ends when the content is lost. It passes to another tenant when that one hits the block while it is
unreferenced::

    without content, uncharged --take--> taken by t --rest--> cached for t --evicted, dropped--> uncharged
                                             ^                    |
                                             +------ resume ------+      a hit of tenant u: charged to u from then on

A tenant has a *cap*, which its taken and cached blocks together never exceed, and a *floor*: the number of blocks that
it can always take, and the number of its charged blocks that are not evicted for other tenants. Tenant 0 is for
sequences without a tenant; it has neither. Allocations are charged to the *current tenant*.

``PoolArrays.tenants`` has a row for each block, and after these four rows for each tenant. They are the sentinels of
its lists of free spare blocks, free cached blocks and free leased blocks, each in the order of release, and its
account::

    row of a block             charged to | next | previous | when it was released
    row of the null block      current tenant | releases | blocks reserved by floors | -
    sentinel of a list         -          | next | previous | -
    account of a tenant        cap        | floor | taken | cached

Tenants come and go while a pool is in use. Rows for a new tenant are appended in place, so that everything that refers
to the array sees them, and its type stays the same. The rows of a removed tenant stay, with an account of nothing.

All operations on a block are O(1). The block to evict under a cap or a floor is chosen by
:mod:`pagedkv.blocks.victims`.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.free_queue import is_leased, is_spare
from pagedkv.blocks.record import (
    CHARGED,
    FREE,
    NAME,
    NO_TENANT,
    NULL_BLOCK,
    NUM_SENTINELS,
    QUEUE,
    TENANT_FIELDS,
    PoolArrays,
)
from pagedkv.blocks.treap import BY_END, insert, remove
from pagedkv.compilation.compiled import compiled, featured, inlined
from pagedkv.contract.arrays import Int32Array

# Columns of a block's row, after CHARGED.
AFTER: Final = 1
BEFORE: Final = 2
STAMP: Final = 3

# Columns of the null block's row.
CURRENT_TENANT: Final = 0
CLOCK: Final = 1
NUM_RESERVED: Final = 2  # blocks that floors guarantee beyond those that their tenants have taken

# The rows of a tenant, relative to its first one.
IN_SPARE: Final = 0
IN_CACHED: Final = 1
IN_LEASED: Final = 2
ACCOUNT: Final = 3
ROWS_A_TENANT: Final = 4

# Columns of an account.
CAP: Final = 0
FLOOR: Final = 1
NUM_TAKEN: Final = 2  # blocks in use or deferred
NUM_RESTING: Final = 3  # free blocks with a name

CLOCK_MASK: Final = 2**31 - 1

# Scopes: which cached blocks are evictable.
ANY: Final = 0
PERMITTED: Final = 1  # the current tenant's, and those of tenants that are charged for more than their floors
OWN: Final = 2  # the current tenant's


def new_accounts(num_blocks: int, limits: tuple[tuple[int, int], ...]) -> Int32Array:
    """Make the accounts of an empty pool, given cap and floor of each tenant; an empty array without tenants."""
    if not limits:
        return np.zeros((0, TENANT_FIELDS), np.int32)
    tenants = np.zeros((num_blocks + ROWS_A_TENANT * len(limits), TENANT_FIELDS), np.int32)
    behind = np.arange(num_blocks, len(tenants))
    tenants[behind, AFTER] = tenants[behind, BEFORE] = behind
    accounts = accounts_of(tenants, num_blocks)
    accounts[:] = 0
    accounts[:, (CAP, FLOOR)] = limits
    tenants[NULL_BLOCK, NUM_RESERVED] = accounts[:, FLOOR].sum()
    return tenants


def accounts_of(tenants: Int32Array, num_blocks: int) -> Int32Array:
    """View the accounts, in the rows after ``num_blocks`` blocks: int32 ``[tenants, 4]``."""
    return tenants[num_blocks + ACCOUNT :: ROWS_A_TENANT]


def add_account(tenants: Int32Array, num_blocks: int, cap: int, floor: int) -> None:
    """Append the account of one more tenant, in place. Views of the array must not outlive this. O(blocks)."""
    first = len(tenants)
    tenants.resize((first + ROWS_A_TENANT, TENANT_FIELDS), refcheck=False)  # the new rows are zeros
    behind = np.arange(first, len(tenants))
    tenants[behind, AFTER] = tenants[behind, BEFORE] = behind
    accounts_of(tenants, num_blocks)[-1] = 0
    set_limits(tenants, num_blocks, len(accounts_of(tenants, num_blocks)) - 1, cap, floor)


def set_limits(tenants: Int32Array, num_blocks: int, tenant: int, cap: int, floor: int) -> None:
    """Set a tenant's cap and floor. The caller sees to it that its blocks are within the cap. O(1)."""
    account = accounts_of(tenants, num_blocks)[tenant]
    before, taken = int(account[FLOOR]), int(account[NUM_TAKEN])
    account[CAP], account[FLOOR] = cap, floor
    tenants[NULL_BLOCK, NUM_RESERVED] += max(0, floor - taken) - max(0, before - taken)


def num_reserved(tenants: Int32Array) -> int:
    """Count the free blocks that floors keep for their tenants. O(1)."""
    return int(tenants[NULL_BLOCK, NUM_RESERVED])


def num_permitted(tenants: Int32Array, num_blocks: int, tenant: int, num_free: int) -> int:
    """Count how many of ``num_free`` blocks a tenant may take, given its cap and the floors of other tenants. O(1)."""
    cap, floor, taken, _ = (int(number) for number in accounts_of(tenants, num_blocks)[tenant])
    others = int(tenants[NULL_BLOCK, NUM_RESERVED]) - max(0, floor - taken)
    return max(0, min(cap - taken, num_free - others))


def set_current_tenant(tenants: Int32Array, tenant: int) -> None:
    """Charge all later allocations to a tenant. No effect without tenants."""
    tenants[:1, CURRENT_TENANT] = tenant


@featured
@inlined
def has_tenants(pool: PoolArrays) -> bool:
    """Whether blocks are charged to tenants."""
    return len(pool.tenants) > 0


@featured
@inlined
def charge_to(pool: PoolArrays, tenant: int) -> None:
    """Set the current tenant, as :func:`set_current_tenant`, in a compiled loop of a pool with tenants."""
    pool.tenants[NULL_BLOCK, CURRENT_TENANT] = tenant


@inlined
def num_tenants(pool: PoolArrays) -> int:
    """Count the tenants, tenant 0 included: 1 without tenants."""
    if len(pool.tenants) == 0:
        return 1
    return (len(pool.tenants) - (len(pool.records) - NUM_SENTINELS)) // ROWS_A_TENANT


@inlined
def list_of(pool: PoolArrays, tenant: int, kind: int) -> int:
    """Return the row of a tenant's list of one kind, or of its account."""
    return len(pool.records) - NUM_SENTINELS + ROWS_A_TENANT * int(tenant) + kind


@inlined
def account_of(pool: PoolArrays, tenant: int) -> int:
    """Return the row of a tenant's account."""
    return list_of(pool, tenant, ACCOUNT)


@inlined
def num_charged(pool: PoolArrays, tenant: int) -> int:
    """Count the blocks that a tenant has taken or cached."""
    account = account_of(pool, tenant)
    return int(pool.tenants[account, NUM_TAKEN]) + int(pool.tenants[account, NUM_RESTING])


@inlined
def is_evictable(pool: PoolArrays, block: int, scope: int) -> bool:
    """Whether a cached block is evictable within a scope."""
    return scope == ANY or is_tenant_evictable(pool, int(pool.tenants[block, CHARGED]), scope)


@inlined
def is_tenant_evictable(pool: PoolArrays, tenant: int, scope: int) -> bool:
    """Whether a tenant's cached blocks are evictable within a scope."""
    if scope == ANY or tenant == pool.tenants[NULL_BLOCK, CURRENT_TENANT]:
        return True
    return scope == PERMITTED and num_charged(pool, tenant) > pool.tenants[account_of(pool, tenant), FLOOR]


@inlined
def _count_taken(pool: PoolArrays, tenant: int, change: int) -> None:
    """Count a block that a tenant takes or releases, and update the blocks that floors reserve."""
    tenants = pool.tenants
    account = account_of(pool, tenant)
    before = max(0, int(tenants[account, FLOOR]) - int(tenants[account, NUM_TAKEN]))
    tenants[account, NUM_TAKEN] += change
    after = max(0, int(tenants[account, FLOOR]) - int(tenants[account, NUM_TAKEN]))
    tenants[NULL_BLOCK, NUM_RESERVED] += after - before


@featured
@inlined
def take(pool: PoolArrays, block: int) -> None:
    """Charge a block without content to the current tenant."""
    pool.tenants[block, CHARGED] = pool.tenants[NULL_BLOCK, CURRENT_TENANT]
    _count_taken(pool, pool.tenants[block, CHARGED], 1)


@featured
@inlined
def rest(pool: PoolArrays, block: int) -> None:
    """Record that a block is unreferenced; a named one is to :func:`join` a list, the charge of others ends."""
    _count_taken(pool, pool.tenants[block, CHARGED], -1)
    if not pool.records[block, NAME]:
        pool.tenants[block, CHARGED] = NO_TENANT


@featured
@inlined
def resume(pool: PoolArrays, block: int) -> None:
    """Record that a cached block is in use again. It stays charged to the same tenant."""
    leave(pool, block)
    _count_taken(pool, pool.tenants[block, CHARGED], 1)


@featured
@compiled
def join(pool: PoolArrays, block: int) -> None:
    """Append a free named block to its tenant's list of the block's kind."""
    tenants = pool.tenants
    tenant = int(tenants[block, CHARGED])
    kind = IN_CACHED
    if is_leased(pool, block):
        kind = IN_LEASED
    elif is_spare(pool, block):
        kind = IN_SPARE
    sentinel = list_of(pool, tenant, kind)
    last = tenants[sentinel, BEFORE]
    tenants[block, AFTER] = sentinel
    tenants[block, BEFORE] = last
    tenants[last, AFTER] = block
    tenants[sentinel, BEFORE] = block
    tenants[block, STAMP] = tenants[NULL_BLOCK, CLOCK]
    tenants[NULL_BLOCK, CLOCK] = (int(tenants[NULL_BLOCK, CLOCK]) + 1) & CLOCK_MASK
    tenants[account_of(pool, tenant), NUM_RESTING] += 1


@featured
@compiled
def leave(pool: PoolArrays, block: int) -> None:
    """Remove a free named block from its tenant's list, whatever its kind."""
    tenants = pool.tenants
    after, before = tenants[block, AFTER], tenants[block, BEFORE]
    tenants[before, AFTER] = after
    tenants[after, BEFORE] = before
    tenants[account_of(pool, tenants[block, CHARGED]), NUM_RESTING] -= 1


@compiled
def charge_hits(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Charge the free ones among some named blocks to the current tenant, which is about to take them by a hit.

    The blocks are still in lists. Together with the payer's cached blocks they may exceed its cap; then some of its
    cached blocks are evicted before the hit.
    """
    for block in block_ids:
        if block == NULL_BLOCK or pool.records[block, QUEUE] != FREE:
            continue
        if is_leased(pool, block):
            remove(pool, BY_END, block)  # ordered by tenant
        leave(pool, block)
        pool.tenants[block, CHARGED] = pool.tenants[NULL_BLOCK, CURRENT_TENANT]
        join(pool, block)
        if is_leased(pool, block):
            insert(pool, BY_END, block)


@compiled
def move_charges(pool: PoolArrays, source: int, target: int) -> None:
    """Charge all blocks of a tenant to another tenant. Lists keep the order of release. O(blocks).

    The target's cap must have room for them.
    """
    tenants = pool.tenants
    num_blocks = list_of(pool, 0, 0)
    for kind in (IN_SPARE, IN_CACHED, IN_LEASED):
        _merge_lists(pool, list_of(pool, source, kind), list_of(pool, target, kind))
    for block in range(1, num_blocks):
        if tenants[block, CHARGED] != source:
            continue
        if pool.records[block, QUEUE] != FREE:
            _count_taken(pool, source, -1)
            _count_taken(pool, target, 1)
            tenants[block, CHARGED] = target
        elif is_leased(pool, block):
            remove(pool, BY_END, block)
            tenants[block, CHARGED] = target
            insert(pool, BY_END, block)
        else:
            tenants[block, CHARGED] = target
    tenants[account_of(pool, target), NUM_RESTING] += tenants[account_of(pool, source), NUM_RESTING]
    tenants[account_of(pool, source), NUM_RESTING] = 0


@compiled
def _merge_lists(pool: PoolArrays, source: int, target: int) -> None:
    """Move all blocks of a list into another one, so that it stays in the order of release. O(blocks of both)."""
    tenants = pool.tenants
    now = int(tenants[NULL_BLOCK, CLOCK])
    block, place = int(tenants[source, AFTER]), int(tenants[target, AFTER])
    while block != source:
        after = int(tenants[block, AFTER])
        age = (now - int(tenants[block, STAMP])) & CLOCK_MASK
        while place != target and ((now - int(tenants[place, STAMP])) & CLOCK_MASK) > age:
            place = int(tenants[place, AFTER])
        before = int(tenants[place, BEFORE])
        tenants[block, AFTER] = place
        tenants[block, BEFORE] = before
        tenants[before, AFTER] = block
        tenants[place, BEFORE] = block
        block = after
    tenants[source, AFTER] = source
    tenants[source, BEFORE] = source
