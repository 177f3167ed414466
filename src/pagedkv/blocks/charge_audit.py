"""The audit of tenants: every block is charged to one of them, and every account adds up. O(blocks)."""

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import (
    CHARGED,
    FREE,
    KEPT,
    NAME,
    NO_TENANT,
    NULL_BLOCK,
    NUM_CACHED,
    NUM_FREE,
    QUEUE,
    SPARE,
    PoolArrays,
)
from pagedkv.blocks.eviction.lru import LRU
from pagedkv.blocks.free_queue import blocks_of_list
from pagedkv.blocks.tenant_charges import (
    AFTER,
    BEFORE,
    CAP,
    CLOCK,
    CLOCK_MASK,
    FLOOR,
    IN_CACHED,
    IN_LEASED,
    IN_SPARE,
    NUM_RESERVED,
    NUM_RESTING,
    NUM_TAKEN,
    STAMP,
    list_of,
)
from pagedkv.contract.arrays import Int32Array

__all__ = ["check_charges"]


def check_charges(pool: BlockPool) -> None:
    """Check that the accounts agree with the blocks; no effect without tenants. Raises AssertionError."""
    arrays = pool.arrays
    if not len(arrays.tenants):
        return
    tenants, is_free = arrays.tenants, arrays.records[: pool.num_blocks, QUEUE] == FREE
    charged = tenants[1 : pool.num_blocks, CHARGED]
    numbers = range(len(pool.accounts))
    assert ((charged >= 0) & (charged < len(numbers))).all(), f"{pool.name}: a block is charged to no tenant"
    is_empty = is_free & (arrays.records[: pool.num_blocks, NAME] == 0)
    assert (tenants[np.flatnonzero(is_empty), CHARGED] == NO_TENANT).all(), f"{pool.name}: an empty block is charged"
    accounts = pool.accounts
    taken = np.bincount(charged[~is_free[1:]], minlength=len(numbers))
    assert (accounts[:, NUM_TAKEN] == taken).all(), f"{pool.name}: blocks that tenants have taken are miscounted"
    promised = int(np.maximum(0, accounts[:, FLOOR] - taken).sum())
    assert tenants[NULL_BLOCK, NUM_RESERVED] == promised, f"{pool.name}: floors promise {promised} more blocks"
    is_within = accounts[:, NUM_TAKEN] + accounts[:, NUM_RESTING] <= accounts[:, CAP]
    assert is_within.all(), f"{pool.name}: tenant {is_within.argmin()} is above its cap"
    assert accounts[:, NUM_RESTING].sum() == arrays.counts[NUM_CACHED], f"{pool.name}: cached blocks are miscounted"
    cold = blocks_of_list(arrays.records, NULL_BLOCK, int(arrays.counts[NUM_FREE]))  # LRU evicts in its order
    for tenant in numbers:
        _check_lists(pool, tenant, int(accounts[tenant, NUM_RESTING]), cold)


def _check_lists(pool: BlockPool, tenant: int, num_cached: int, cold: list[int]) -> None:
    """Check that a tenant's lists hold its cached blocks, each in the list of its kind, in the order of release."""
    arrays, where = pool.arrays, f"{pool.name}, tenant {tenant}"
    num_listed = 0
    for kind in (IN_SPARE, IN_CACHED, IN_LEASED):
        listed = _walk(arrays.tenants, list_of(arrays, tenant, kind), num_cached)
        num_listed += len(listed)
        mine = set(listed)
        assert all(_kind_of(arrays, block) == kind for block in listed), f"{where}: a block is in another kind's list"
        assert (arrays.tenants[listed, CHARGED] == tenant).all(), f"{where}: a block is in another tenant's list"
        ages = (arrays.tenants[NULL_BLOCK, CLOCK].astype(int) - arrays.tenants[listed, STAMP]) & CLOCK_MASK
        assert (np.diff(ages) < 0).all(), f"{where}: blocks are listed out of the order of their release"
        if kind == IN_CACHED and pool.policy is LRU:
            own = [block for block in cold if block in mine]
            assert own == listed, f"{where}: its blocks would be evicted in another order than all"
    assert num_listed == num_cached, f"{where}: {num_cached} cached blocks, {num_listed} listed"


def _walk(tenants: Int32Array, sentinel: int, most: int) -> list[int]:
    """Read a list of at most ``most`` blocks, checking the links in both directions."""
    listed: list[int] = []
    place = sentinel
    while (following := int(tenants[place, AFTER])) != sentinel and len(listed) <= most:
        assert tenants[following, BEFORE] == place, f"block {following} of a list does not stand behind {place}"
        listed.append(following)
        place = following
    return listed


def _kind_of(pool: PoolArrays, block: int) -> int:
    """Return the list that a block belongs to; -1 if none."""
    if pool.records[block, QUEUE] != FREE or not pool.records[block, NAME]:
        return -1
    if len(pool.leases) and pool.leases[block] > 0:
        return IN_LEASED
    return IN_SPARE if pool.records[block, KEPT] == SPARE else IN_CACHED
