"""Tenants of a space: which tenant is charged for what an operation takes, and what each tenant has.

Rows and loads belong to a tenant; forks to their parent's. The pools charge blocks
(:mod:`pagedkv.blocks.tenant_charges`, :mod:`pagedkv.blocks.tenant_victims`). The :class:`TenantRoom` of the
space counts whether there are enough for a tenant. If an operation takes blocks for several tenants, each must find
enough beside the others. Their order makes no difference, since the blocks that a floor reserves are free for its
tenant alone.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from pagedkv.blocks import tenant_charges, tenant_victims
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import CHARGED, FREE, NO_TENANT, QUEUE
from pagedkv.blocks.tenant_charges import CAP, FLOOR, NUM_RESTING, NUM_TAKEN
from pagedkv.contract.answers import Shortage, TenantShare
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.errors import ConfigurationError
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.shortage import Arrival, Needs, Places, Room
from pagedkv.space.state import SpaceState
from pagedkv.tables.row_record import set_tenant
from pagedkv.tables.rows import NUM_TOKENS, STATUS, TENANT, VACANT, blocks_for
from pagedkv.tables.swapping import NEW_PLACE

__all__ = ["VACANT_NUMBER", "TenantFeature", "TenantRoom"]

VACANT_NUMBER: Final = ""
"""Stands for the name of a tenant that was removed, until another one gets its number."""


class _Left:
    """What is left of one pool for its tenants, while tenants take blocks of it one after another."""

    def __init__(self, limits: tuple[tuple[int, int], ...], num_taken: list[int], num_free: int) -> None:
        self._limits = limits
        self._num_taken = num_taken
        self._num_free = num_free

    def num_permitted(self, tenant: int) -> int:
        """Count the blocks that a tenant may take."""
        promised = [max(0, floor - taken) for (_, floor), taken in zip(self._limits, self._num_taken, strict=True)]
        others = sum(promised) - promised[tenant]
        return max(0, min(self._limits[tenant][0] - self._num_taken[tenant], self._num_free - others))

    def first_too_needy(self, needs: Needs, pool: str) -> int | None:
        """Take for each tenant what it needs of a pool; return the first tenant for which there is too little."""
        for tenant in sorted(needs):
            count = needs[tenant][pool]
            if count > self.num_permitted(tenant):
                return tenant
            self._num_taken[tenant] += count
            self._num_free -= count
        return None


class TenantRoom(Room):
    """The free blocks of a space with tenants.

    Attributes:
        limits: cap and floor of each tenant, by pool and number.
    """

    def __init__(self, state: SpaceState) -> None:
        """Begin with the tenants of the configuration. O(tenants)."""
        super().__init__(state)
        self.names = (None, *(state.config.tenants or {}))
        self.limits = state.config.limits_by_pool()

    def take(self, names: tuple[str | None, ...], config: SpaceConfig) -> None:
        """Record which tenants there are from now on, by number, and their limits, from a configuration."""
        self._state.config, self.names = config, names
        by_name = {
            pool: dict(zip((None, *(config.tenants or {})), limits, strict=True))
            for pool, limits in config.limits_by_pool().items()
        }
        self.limits = {
            pool: tuple(limits.get(name, limits[None]) for name in names) for pool, limits in by_name.items()
        }

    # Tenants

    def number_of(self, tenant: object) -> int:
        """Return the number of a tenant by its name; None stands for no tenant. Raises ConfigurationError."""
        if tenant is None:
            return NO_TENANT
        if not isinstance(tenant, str) or tenant == VACANT_NUMBER or tenant not in self.names:
            names = [name for name in self.names[1:] if name != VACANT_NUMBER]
            raise ConfigurationError(f"there is no tenant {tenant!r}: they are {names}")
        return self.names.index(tenant)

    def tenant_of(self, row: int) -> int:
        """Return the tenant of a row."""
        return int(self._state.rows[row, TENANT])

    def by_tenant(self, batch: Int32Array) -> list[tuple[int, Places]]:
        """Return each tenant that has rows in a batch, in order, and the places of its rows."""
        tenants = self._state.rows[batch, TENANT]
        return [(tenant, np.flatnonzero(tenants == tenant).astype(np.int32)) for tenant in np.unique(tenants).tolist()]

    def by_arrival(
        self, batch: Int32Array, num_taken: dict[str, int], num_distinct: dict[str, int], places: dict[str, Int32Array]
    ) -> Arrival:
        """Divide what a batch takes: the tenant of the first row that holds a shared block is charged for it."""
        del num_taken, num_distinct
        tenants = [tenant for tenant, _ in self.by_tenant(batch)]
        arrival = Arrival({it: {} for it in tenants}, {it: {} for it in tenants}, {it: {} for it in tenants})
        for name, pool in self._state.pools.items():
            moved_to, charged = places[name], self._tenants_to_charge(batch, name)
            was_counted = np.zeros(pool.num_blocks, np.bool_)
            for tenant in tenants:
                mine = moved_to[(charged == tenant) & (moved_to != 0)]
                twins = np.unique(-mine[mine != NEW_PLACE])
                own = twins[(pool.arrays.records[twins, QUEUE] == FREE) & ~was_counted[twins]].astype(np.int32)
                was_counted[own] = True
                arrival.twins[tenant][name] = own
                arrival.num_taken[tenant][name] = int((mine == NEW_PLACE).sum()) + len(own)
                arrival.num_distinct[tenant][name] = len(mine)
        return arrival

    def _tenants_to_charge(self, batch: Int32Array, pool: str) -> Int32Array:
        """Return the tenant of the first row of a batch that holds each block of a host pool: int32 ``[blocks]``."""
        state = self._state
        tenants = np.zeros(state.host_pools[pool].num_blocks, np.int32)
        for group in state.groups:
            for row in batch[::-1].tolist() if group.pool.name == pool else ():
                num_blocks = blocks_for(int(state.rows[row, NUM_TOKENS]), group.block_size)
                tenants[group.arrays.table[row, :num_blocks]] = self.tenant_of(row)
        return tenants

    # Questions about needs

    def is_ample(self, count: int) -> bool:
        """Return False: each tenant's share must be counted."""
        del count
        return False

    def find_shortage(self, needs: Needs) -> Shortage | None:
        """Return the shortage of the first pool with too few free blocks for a tenant, if any."""
        for name, pool in self._state.pools.items():
            left = self._left(pool)
            tenant = left.first_too_needy(needs, name)
            if tenant is not None:
                share = replace(self._share(pool, tenant), num_permitted=left.num_permitted(tenant))
                return Shortage(name, int(needs[tenant][name]), pool.num_free, share)
        return None

    def fits_now(self, needs: Needs) -> bool:
        """Return whether the pools have enough blocks beside the watermark."""
        return all(
            self._left(pool, self.num_kept(pool)).first_too_needy(needs, name) is None
            for name, pool in self._state.pools.items()
        )

    def _left(self, pool: BlockPool, num_kept: int = 0) -> _Left:
        """Return what is left now, less some free blocks that are put aside."""
        return _Left(self.limits[pool.name], pool.accounts[:, NUM_TAKEN].tolist(), pool.num_free - num_kept)

    def _fits(self, needs: Needs, pool: BlockPool, in_use: Int32Array) -> bool:
        """Return whether a pool would have enough blocks if only these were in use, each charged as it is now."""
        counts = np.bincount(pool.arrays.tenants[in_use, CHARGED], minlength=len(self.names))
        left = _Left(self.limits[pool.name], [int(count) for count in counts], pool.num_usable - len(in_use))
        return left.first_too_needy(needs, pool.name) is None

    def spare(self, pool: BlockPool, tenant: int) -> int:
        """Count the blocks that an admission may take for a tenant, beside what the watermark keeps free."""
        return self._left(pool, self.num_kept(pool)).num_permitted(tenant)

    # Shares

    def shares(self) -> tuple[TenantShare, ...]:
        """List what each tenant has of each device pool, pool by pool."""
        numbers = [number for number, name in enumerate(self.names) if name != VACANT_NUMBER]
        return tuple(self._share(pool, number) for pool in self._state.pools.values() for number in numbers)

    def shares_of(self, tenant: int) -> tuple[TenantShare, ...]:
        """List what a tenant has of each device pool."""
        return tuple(self._share(pool, tenant) for pool in self._state.pools.values())

    def _share(self, pool: BlockPool, tenant: int) -> TenantShare:
        account = pool.accounts[tenant].tolist()
        return TenantShare(
            tenant=self.names[tenant],
            pool=pool.name,
            cap=account[CAP],
            floor=account[FLOOR],
            num_taken=account[NUM_TAKEN],
            num_cached=account[NUM_RESTING],
            num_permitted=pool.num_permitted(tenant),
        )

    def counts_of(self, pool: BlockPool) -> Int32Array:
        """Count what each tenant has of a pool: int32 ``[tenants, 2]``, blocks in use or deferred, and cached ones."""
        return pool.accounts[:, (NUM_TAKEN, NUM_RESTING)]

    def most_blocks(self, tenant: int) -> dict[str, int]:
        """Count, by pool, the blocks that a tenant can have at most: its cap, or what others' floors leave."""
        most = {}
        for name, limits in self.limits.items():
            floors_of_others = sum(floor for _, floor in limits) - limits[tenant][1]
            most[name] = min(limits[tenant][0], self._state.pools[name].num_usable - floors_of_others)
        return most


class TenantFeature(SpaceFeature):
    """The part of the operations that charges tenants."""

    def __init__(self, state: SpaceState) -> None:
        """Give a space the room of its tenants. O(tenants)."""
        self._state = state
        self._room = state.room = TenantRoom(state)

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

    def check(self) -> None:
        """Rows belong to tenants that there are, the others are charged for nothing, and pools have the limits."""
        names, tenants = self._room.names, self._state.rows[:, TENANT]
        is_known = (tenants >= 0) & (tenants < len(names))
        assert is_known.all(), f"row {is_known.argmin()} is of no tenant"
        removed = [number for number, name in enumerate(names) if name == VACANT_NUMBER]
        assert not np.isin(tenants, removed).any(), "a row is of a removed tenant"
        for name, pool in self._state.pools.items():
            has = pool.accounts[removed]
            assert not has[:, (NUM_TAKEN, NUM_RESTING)].any(), f"{name}: a removed tenant is charged for blocks"
            limits = [tuple(each) for each in pool.accounts[:, (CAP, FLOOR)].tolist()]
            assert limits == list(self._room.limits[name]), f"{name}: the limits of tenants are not those of the pool"
        assert not tenants[self._state.rows[:, STATUS] == VACANT].any(), "a vacant row is a tenant's"
