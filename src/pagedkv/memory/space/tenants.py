"""Tenants of a space: which tenant is charged for what an operation takes, and what each tenant has.

Rows and loads belong to a tenant; forks to their parent's. The pools charge blocks
(:mod:`pagedkv.memory.pool.tenant_charges`, :mod:`pagedkv.memory.pool.tenant_victims`), and
:mod:`pagedkv.memory.space.shortage` counts whether there are enough for a tenant. Without tenants all of this does
nothing.
"""

from collections.abc import Iterator

import numpy as np

from pagedkv.memory.contract.answers import TenantShare
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.pool import tenant_charges, tenant_victims
from pagedkv.memory.pool.block_pool import BlockPool
from pagedkv.memory.pool.tenant_charges import CAP, FLOOR, NO_TENANT, NUM_RESTING, NUM_TAKEN
from pagedkv.memory.space.feature import SpaceFeature
from pagedkv.memory.space.state import VACANT_NUMBER, SpaceState
from pagedkv.memory.tables.row_record import set_tenant
from pagedkv.memory.tables.rows import TENANT

__all__ = [
    "TenantFeature",
    "as_tenant",
    "batches_by_tenant",
    "list_shares",
    "most_blocks",
    "share_of",
    "tenant_of",
]


def as_tenant(state: SpaceState, tenant: object) -> int:
    """Return the number of a tenant by its name; None stands for no tenant. Raises ConfigurationError."""
    if tenant is None:
        return NO_TENANT
    if not isinstance(tenant, str) or tenant == VACANT_NUMBER or tenant not in state.tenant_names:
        names = [name for name in state.tenant_names[1:] if name != VACANT_NUMBER]
        known = f"they are {names}" if state.tenant_names else "set tenants in the configuration"
        raise ConfigurationError(f"there is no tenant {tenant!r}: {known}")
    return state.tenant_names.index(tenant)


def tenant_of(state: SpaceState, row: int) -> int:
    """Return the tenant of a row."""
    return int(state.rows[row, TENANT]) if state.tenant_names else NO_TENANT


def batches_by_tenant(state: SpaceState, batch: Int32Array) -> Iterator[tuple[int, Int32Array]]:
    """Yield each tenant that has rows in a batch, in order, and the places of its rows: int32 ``[any]``."""
    tenants = state.rows[batch, TENANT]
    for tenant in np.unique(tenants).tolist():
        yield tenant, np.flatnonzero(tenants == tenant).astype(np.int32)


class TenantFeature(SpaceFeature):
    """The part of the operations that charges tenants, if there are any."""

    def __init__(self, state: SpaceState) -> None:
        """Use the state of a space. O(1)."""
        self._state = state

    def row_taken(self, batch: Int32Array, tenant: int) -> None:
        """Record the row's tenant."""
        set_tenant(self._state.rows, batch, tenant)

    def forked(self, parent: int, children: Int32Array) -> None:
        """Give forks the tenant of their parent."""
        set_tenant(self._state.rows, children, self._state.rows[parent, TENANT])

    def taking(self, tenant: int) -> None:
        """Charge blocks that are taken from the device pools from now on to this tenant."""
        for pool in self._state.pools.values():
            pool.charge_to(tenant)

    def reviving(self, pool: BlockPool, blocks: Int32Array) -> None:
        """Charge the unreferenced ones of blocks that are about to be taken to the paying tenant."""
        tenant_charges.charge_hits(pool.arrays, blocks)

    def taken(self, tenant: int) -> None:
        """Evict cached blocks of a tenant that has taken hits, down to its caps."""
        self.taking(tenant)
        for pool in self._state.pools.values():
            tenant_victims.keep_cap(pool.arrays, tenant, 0)


def share_of(state: SpaceState, pool: BlockPool, tenant: int) -> TenantShare:
    """Return what a tenant has of a pool."""
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
    """List what each tenant has of each device pool, pool by pool; empty without tenants."""
    numbers = [number for number, name in enumerate(state.tenant_names) if name != VACANT_NUMBER]
    return tuple(share_of(state, pool, number) for pool in state.pools.values() for number in numbers)


def most_blocks(state: SpaceState, tenant: int) -> dict[str, int]:
    """Count, by pool, the blocks that a tenant can have at most: its cap, or what other tenants' floors leave."""
    if not state.tenant_names:
        return {name: pool.num_usable for name, pool in state.pools.items()}
    most = {}
    for name, limits in state.limits.items():
        floors_of_others = sum(floor for _, floor in limits) - limits[tenant][1]
        most[name] = min(limits[tenant][0], state.pools[name].num_usable - floors_of_others)
    return most
