"""Tenants of a space: who pays for what an operation takes, and what each tenant has.

Rows and loads are a tenant's; forks are their parent's. What that means for blocks is the pools' business
(:mod:`pagedkv.memory.pool.tenant_charges`, :mod:`pagedkv.memory.pool.tenant_victims`); whether there is enough for a
tenant, :mod:`pagedkv.memory.space.shortage` says. Where there are no tenants, all of this does nothing.
"""

from collections.abc import Iterator

import numpy as np

from pagedkv.memory.contract.answers import TenantShare
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.pool import tenant_charges, tenant_victims
from pagedkv.memory.pool.block_pool import BlockPool
from pagedkv.memory.pool.tenant_charges import CAP, FLOOR, NOBODY, NUM_RESTING, NUM_TAKEN
from pagedkv.memory.space.feature import SpaceFeature
from pagedkv.memory.space.state import SpaceState
from pagedkv.memory.tables.row_record import set_tenant
from pagedkv.memory.tables.rows import TENANT

__all__ = [
    "TenantFeature",
    "as_tenant",
    "batches_by_tenant",
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


class TenantFeature(SpaceFeature):
    """What is charged beside the operations, where there are tenants."""

    def __init__(self, state: SpaceState) -> None:
        """Follow a space. O(1)."""
        self._state = state

    def row_taken(self, batch: Int32Array, tenant: int) -> None:
        """A row is its tenant's."""
        set_tenant(self._state.rows, batch, tenant)

    def forked(self, parent: int, children: Int32Array) -> None:
        """Forks are their parent's tenant's."""
        set_tenant(self._state.rows, children, self._state.rows[parent, TENANT])

    def taking(self, tenant: int) -> None:
        """What is taken of the device pools from now on is charged to a tenant."""
        for pool in self._state.pools.values():
            pool.let_pay(tenant)

    def reviving(self, pool: BlockPool, blocks: Int32Array) -> None:
        """What nobody uses of some blocks, which are about to be taken, is charged to the payer."""
        tenant_charges.charge_hits(pool.arrays, blocks)

    def taken(self, tenant: int) -> None:
        """A tenant that has taken hits gives up what its caps have no room for any more."""
        self.taking(tenant)
        for pool in self._state.pools.values():
            tenant_victims.keep_cap(pool.arrays, tenant, 0)


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
