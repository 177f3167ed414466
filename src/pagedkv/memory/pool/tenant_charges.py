"""Whom blocks are charged to: the accounts of tenants, and what each of them has cached.

Whoever takes a block out of the free ones is charged for it: as a new block, or by a hit of what nobody used. While it
is in use, deferred, or cached afterwards, it stays charged to that tenant, whoever else shares it. The charge ends when
the content is given up, and goes over when somebody else hits the block while nobody uses it::

    without content, nobody's --take--> taken by t --rest--> cached for t --evicted, dropped--> nobody's
                                             ^                    |
                                             +------ resume ------+      a hit of tenant u: charged to u from then on

A tenant has a *cap*, which taken and cached blocks together never exceed, and a *floor*: so many blocks can always be
taken by it, and so many that are charged to it are evicted for nobody else. Tenant 0 is whoever names none; it has
neither. The *payer* is the tenant that takes blocks just now.

``PoolArrays.tenants`` has a row for each block, and behind these four for each tenant: the sentinels of its lists of
free blocks, spare ones, cached ones and leased ones, each in the order of release, and its account::

    row of a block             charged to | next | previous | when it was released
    row of the null block      payer      | releases | blocks reserved by floors | -
    sentinel of a list         -          | next | previous | -
    account of a tenant        cap        | floor | taken | cached

All operations are O(1). Which block goes when a cap or a floor is in the way, :mod:`pagedkv.memory.pool.tenant_victims`
says.
"""

from typing import Final

import numpy as np

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import (
    CHARGED,
    FREE,
    KEPT,
    NAME,
    NULL_BLOCK,
    NUM_SENTINELS,
    QUEUE,
    SPARE,
    TENANT_FIELDS,
    PoolArrays,
)
from pagedkv.memory.pool.treap import BY_END, insert, remove

__all__ = [
    "NOBODY",
    "account_of",
    "accounts_of",
    "charge_hits",
    "join",
    "leave",
    "let_pay",
    "list_of",
    "may_go",
    "new_accounts",
    "num_charged",
    "num_permitted",
    "num_tenants",
    "rest",
    "resume",
    "set_payer",
    "take",
    "tenant_may_give",
    "uncharge",
]

NOBODY: Final = 0
"""The tenant of whoever names none, and what a block without content is charged to."""

# Columns of a block's row, behind CHARGED.
AFTER: Final = 1
BEFORE: Final = 2
STAMP: Final = 3

# Columns of the null block's.
PAYER: Final = 0
CLOCK: Final = 1
NUM_RESERVED: Final = 2  # blocks that floors promise beyond what their tenants have taken

# The rows of a tenant, counted from its first.
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

# Which cached blocks may go.
ANY: Final = 0
PERMITTED: Final = 1  # the payer's, and those of tenants that are charged for more than their floors
OWN: Final = 2  # the payer's


def new_accounts(num_blocks: int, limits: tuple[tuple[int, int], ...]) -> Int32Array:
    """Make the accounts of an empty pool, given cap and floor of each tenant; nothing where there are none."""
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
    """View the accounts in the rows behind so many blocks: int32 ``[tenants, 4]``."""
    return tenants[num_blocks + ACCOUNT :: ROWS_A_TENANT]


def num_permitted(tenants: Int32Array, num_blocks: int, tenant: int, num_free: int) -> int:
    """Count the blocks that a tenant may take of so many free ones: within its cap, and beside others' floors. O(1)."""
    cap, floor, taken, _ = (int(number) for number in accounts_of(tenants, num_blocks)[tenant])
    others = int(tenants[NULL_BLOCK, NUM_RESERVED]) - max(0, floor - taken)
    return max(0, min(cap - taken, num_free - others))


def set_payer(tenants: Int32Array, tenant: int) -> None:
    """Charge what is taken from now on to a tenant. Nothing where there are no tenants."""
    tenants[:1, PAYER] = tenant


@inlined
def let_pay(pool: PoolArrays, tenant: int) -> None:
    """Do what :func:`set_payer` does, in a loop and where there are tenants."""
    pool.tenants[NULL_BLOCK, PAYER] = tenant


@inlined
def num_tenants(pool: PoolArrays) -> int:
    """Count the tenants, whoever names none among them: 1 where there are none."""
    if len(pool.tenants) == 0:
        return 1
    return (len(pool.tenants) - (len(pool.records) - NUM_SENTINELS)) // ROWS_A_TENANT


@inlined
def list_of(pool: PoolArrays, tenant: int, kind: int) -> int:
    """Name the row of a tenant's list of one kind, or its account."""
    return len(pool.records) - NUM_SENTINELS + ROWS_A_TENANT * int(tenant) + kind


@inlined
def account_of(pool: PoolArrays, tenant: int) -> int:
    """Name the row of a tenant's account."""
    return list_of(pool, tenant, ACCOUNT)


@inlined
def num_charged(pool: PoolArrays, tenant: int) -> int:
    """Count the blocks that a tenant has taken, or has cached."""
    account = account_of(pool, tenant)
    return int(pool.tenants[account, NUM_TAKEN]) + int(pool.tenants[account, NUM_RESTING])


@inlined
def may_go(pool: PoolArrays, block: int, scope: int) -> bool:
    """Tell whether a cached block may be evicted."""
    return scope == ANY or tenant_may_give(pool, int(pool.tenants[block, CHARGED]), scope)


@inlined
def tenant_may_give(pool: PoolArrays, tenant: int, scope: int) -> bool:
    """Tell whether what a tenant has cached may be evicted."""
    if scope == ANY or tenant == pool.tenants[NULL_BLOCK, PAYER]:
        return True
    return scope == PERMITTED and num_charged(pool, tenant) > pool.tenants[account_of(pool, tenant), FLOOR]


@inlined
def _count_taken(pool: PoolArrays, tenant: int, change: int) -> None:
    """Note that a tenant has taken a block, or given one back; what its floor still promises is reserved."""
    tenants = pool.tenants
    account = account_of(pool, tenant)
    before = max(0, int(tenants[account, FLOOR]) - int(tenants[account, NUM_TAKEN]))
    tenants[account, NUM_TAKEN] += change
    after = max(0, int(tenants[account, FLOOR]) - int(tenants[account, NUM_TAKEN]))
    tenants[NULL_BLOCK, NUM_RESERVED] += after - before


@inlined
def take(pool: PoolArrays, block: int) -> None:
    """Charge a block without content to the payer."""
    pool.tenants[block, CHARGED] = pool.tenants[NULL_BLOCK, PAYER]
    _count_taken(pool, pool.tenants[block, CHARGED], 1)


@inlined
def uncharge(pool: PoolArrays, block: int) -> None:
    """Charge a free block, which has no content any more, to nobody."""
    pool.tenants[block, CHARGED] = NOBODY


@inlined
def rest(pool: PoolArrays, block: int) -> None:
    """Note that nobody uses a block any more; if it has a name it is to :func:`join` a list, else it is nobody's."""
    _count_taken(pool, pool.tenants[block, CHARGED], -1)
    if not pool.records[block, NAME]:
        uncharge(pool, block)


@inlined
def resume(pool: PoolArrays, block: int) -> None:
    """Note that somebody uses a cached block again. It stays charged to whom it was."""
    leave(pool, block)
    _count_taken(pool, pool.tenants[block, CHARGED], 1)


@compiled
def join(pool: PoolArrays, block: int, kind: int) -> None:
    """Put a free named block at the back of its tenant's list of one kind."""
    tenants = pool.tenants
    tenant = int(tenants[block, CHARGED])
    sentinel = list_of(pool, tenant, kind)
    last = tenants[sentinel, BEFORE]
    tenants[block, AFTER] = sentinel
    tenants[block, BEFORE] = last
    tenants[last, AFTER] = block
    tenants[sentinel, BEFORE] = block
    tenants[block, STAMP] = tenants[NULL_BLOCK, CLOCK]
    tenants[NULL_BLOCK, CLOCK] = (int(tenants[NULL_BLOCK, CLOCK]) + 1) & CLOCK_MASK
    tenants[account_of(pool, tenant), NUM_RESTING] += 1


@compiled
def leave(pool: PoolArrays, block: int) -> None:
    """Take a free named block out of its tenant's list."""
    tenants = pool.tenants
    after, before = tenants[block, AFTER], tenants[block, BEFORE]
    tenants[before, AFTER] = after
    tenants[after, BEFORE] = before
    tenants[account_of(pool, tenants[block, CHARGED]), NUM_RESTING] -= 1


@compiled
def charge_hits(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Charge those of some named blocks that nobody uses to the payer, who is about to take them.

    They are out of no list yet, and may exceed the payer's cap together with what it has cached, which is to go first.
    """
    for block in block_ids:
        if block == NULL_BLOCK or pool.records[block, QUEUE] != FREE:
            continue
        kind = IN_CACHED
        if pool.records[block, KEPT] == SPARE:
            kind = IN_SPARE
        elif len(pool.leases) > 0 and pool.leases[block] > 0:
            kind = IN_LEASED
            remove(pool, BY_END, block)
        leave(pool, block)
        pool.tenants[block, CHARGED] = pool.tenants[NULL_BLOCK, PAYER]
        join(pool, block, kind)
        if kind == IN_LEASED:
            insert(pool, BY_END, block)
