"""Tenants of a space: who pays for what an operation takes, and what each tenant has.

Rows and loads are a tenant's; forks are their parent's. What that means for blocks is the pools' business
(:mod:`pagedkv.pool.charging`, :mod:`pagedkv.pool.capping`); whether there is enough for a tenant,
:mod:`pagedkv.space.scarcity` says. Where there are no tenants, all of this does nothing.
"""

from collections.abc import Iterator

import numpy as np

from pagedkv.answers import TenantShare
from pagedkv.arrays import Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.pool import capping, charging
from pagedkv.pool.block_pool import BlockPool
from pagedkv.pool.charging import CAP, FLOOR, NOBODY, NUM_RESTING, NUM_TAKEN
from pagedkv.space.state import SpaceState
from pagedkv.tables.rows import TENANT

__all__ = [
    "as_tenant",
    "batches_by_tenant",
    "charge_hits",
    "charge_prefix",
    "keep_cap",
    "let_pay",
    "list_shares",
    "share_of",
    "tenant_of",
]


def as_tenant(state: SpaceState, tenant: object) -> int:
    """Look up the number of a tenant by its name; None is whoever names none. Raises ConfigurationError."""
    if tenant is None:
        return NOBODY
    if not isinstance(tenant, str) or tenant not in state.tenant_names:
        known = f"they are {list(state.tenant_names[1:])}" if state.tenant_names else "set tenants in the configuration"
        raise ConfigurationError(f"there is no tenant {tenant!r}: {known}")
    return state.tenant_names.index(tenant)


def tenant_of(state: SpaceState, row: int) -> int:
    """Tell whose a row is."""
    return int(state.rows[row, TENANT]) if state.tenant_names else NOBODY


def batches_by_tenant(state: SpaceState, batch: Int32Array) -> Iterator[tuple[int, Int32Array]]:
    """Give each tenant that has rows of a batch, in order, and the places of its rows: int32 ``[any]``."""
    tenants = state.rows[batch, TENANT]
    for tenant in np.unique(tenants).tolist():
        yield tenant, np.flatnonzero(tenants == tenant).astype(np.int32)


def let_pay(state: SpaceState, tenant: int) -> None:
    """Charge what is taken of the device pools from now on to a tenant."""
    if state.tenant_names:
        for pool in state.pools.values():
            pool.let_pay(tenant)


def charge_hits(state: SpaceState, pool: BlockPool, block_ids: Int32Array) -> None:
    """Charge what nobody uses of some blocks, which are about to be taken, to the payer."""
    if state.tenant_names:
        charging.charge_hits(pool.arrays, block_ids)


def charge_prefix(state: SpaceState, block_ids: tuple[Int32Array, ...]) -> None:
    """Charge what nobody uses of a hit's blocks, group by group, to the payer, before any of them is taken."""
    if state.tenant_names:
        for group, blocks in zip(state.groups, block_ids, strict=True):
            charging.charge_hits(group.pool.arrays, blocks)


def keep_cap(state: SpaceState, tenant: int) -> None:
    """Let a tenant that has taken hits give up what its caps have no room for any more."""
    if state.tenant_names:
        let_pay(state, tenant)
        for pool in state.pools.values():
            capping.keep_cap(pool.arrays, tenant, 0)


def share_of(state: SpaceState, pool: BlockPool, tenant: int) -> TenantShare:
    """Tell what a tenant has of a pool."""
    account = pool.accounts[tenant].tolist()
    return TenantShare(
        tenant=state.tenant_names[tenant],
        pool=pool.name,
        cap=account[CAP],
        floor=account[FLOOR],
        num_taken=account[NUM_TAKEN],
        num_cached=account[NUM_RESTING],
        num_permitted=pool.num_permitted(tenant),
    )


def list_shares(state: SpaceState) -> tuple[TenantShare, ...]:
    """Tell what each tenant has of each device pool, pool by pool; nothing where there are no tenants."""
    return tuple(
        share_of(state, pool, tenant) for pool in state.pools.values() for tenant in range(len(state.tenant_names))
    )
