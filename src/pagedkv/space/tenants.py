"""Tenants of a space: which tenant is charged for what an operation takes, and what each tenant has.

Rows and loads belong to a tenant; forks to their parent's. The pools charge blocks
(:mod:`pagedkv.blocks.tenant_charges`, :mod:`pagedkv.blocks.victims`). The :class:`TenantRoom` of the
space counts whether there are enough for a tenant. If an operation takes blocks for several tenants, each must find
enough beside the others. Their order makes no difference, since the blocks that a floor reserves are free for its
tenant alone.

Tenants come, go and get other limits while the space is in use. A tenant's number is its place in the accounts of the
pools and in the rows. The number of a removed tenant is given to the next new one. What a removed tenant is charged for
is charged to the unnamed tenant, so nothing is evicted and hits stay as they are. Content that is to go with its tenant
can be dropped first (:meth:`BlockSpace.forget <pagedkv.BlockSpace.forget>`).
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from pagedkv.blocks import tenant_charges, victims
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.record import CHARGED, FREE, NO_TENANT, QUEUE
from pagedkv.blocks.tenant_charges import CAP, FLOOR, NUM_RESTING, NUM_TAKEN, add_account, move_charges, set_limits
from pagedkv.contract.answers import Shortage, TenantShare
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig, TenantLimits
from pagedkv.errors import ConfigurationError
from pagedkv.space.rows import STATUS, TENANT, VACANT, blocks_for
from pagedkv.space.state import NEW_PLACE, Arrival, Needs, Places, Room, SpaceState

VACANT_NUMBER: Final = ""
"""Stands for the name of a tenant that was removed, until another one gets its number."""


class _Left:
    """What is left of one pool for its tenants, while tenants take blocks of it one after another."""

    def __init__(self, accounts: Int32Array, num_free: int, num_reserved: int) -> None:
        """Begin with the accounts of a pool (int32 ``[tenants, 4]``), its free blocks, and those that floors keep."""
        self._accounts = accounts
        self._taken: dict[int, int] = {}
        self._num_free = num_free
        self._num_reserved = num_reserved

    def num_permitted(self, tenant: int) -> int:
        """Count the blocks that a tenant may take. O(1)."""
        cap, floor, taken = self._account(tenant)
        others = self._num_reserved - max(0, floor - taken)
        return max(0, min(cap - taken, self._num_free - others))

    def first_too_needy(self, needs: Needs, pool: str) -> int | None:
        """Take for each tenant what it needs of a pool; return the first tenant for which there is too little."""
        for tenant in sorted(needs):
            count = needs[tenant][pool]
            if count > self.num_permitted(tenant):
                return tenant
            _, floor, taken = self._account(tenant)
            self._taken[tenant] = taken + count
            self._num_free -= count
            self._num_reserved -= max(0, floor - taken) - max(0, floor - taken - count)
        return None

    def _account(self, tenant: int) -> tuple[int, int, int]:
        """Return a tenant's cap and floor, and the blocks that it has taken."""
        cap, floor, taken, _ = self._accounts[tenant].tolist()
        return cap, floor, self._taken.get(tenant, taken)


class TenantRoom(Room):
    """The free blocks of a space with tenants.

    Attributes:
        tenants: the tenants that there are, with the limits as given.
        names: of the tenants by number, first None; that of a removed one is :data:`VACANT_NUMBER`.
        limits: cap and floor of each tenant, by pool and number; those of the unnamed one for a removed tenant.
    """

    def __init__(self, state: SpaceState) -> None:
        """Begin with the tenants of the configuration. O(tenants)."""
        super().__init__(state)
        self.tenants = dict(state.config.tenants or {})
        self.limits = {pool: list(limits) for pool, limits in state.config.limits_by_pool().items()}
        self._config: SpaceConfig | None = state.config
        self.names: list[str | None] = [None, *self.tenants]
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._vacant: list[int] = []
        self._promised = {pool: sum(floor for _, floor in limits) for pool, limits in self.limits.items()}

    # Tenants that come and go

    @property
    def config(self) -> SpaceConfig:
        """The space's configuration, with the tenants that there are now. O(tenants) after one came or went."""
        if self._config is None:
            self._config = replace(self._state.config, tenants=dict(self.tenants))
        return self._config

    def require(self, name: str, given: TenantLimits) -> dict[str, tuple[int, int]]:
        """Return cap and floor by pool of a tenant that is to get these limits. O(pools).

        Raises:
            ConfigurationError: the pools cannot keep them beside those of the other tenants.
        """
        limits = self._state.config.limits_of(name, given)
        number = self._numbers.get(name)
        self._state.config.require_floors(
            {
                pool: self._promised[pool] + floor - (0 if number is None else self.limits[pool][number][1])
                for pool, (_, floor) in limits.items()
            }
        )
        return limits

    def add(self, name: str, given: TenantLimits, limits: Mapping[str, tuple[int, int]]) -> tuple[int, bool]:
        """Record a tenant's limits; return its number, and whether the pools have no account of that number yet."""
        self._config, self.tenants[name] = None, given
        number, is_new = self._numbers.get(name, len(self.names)), False
        if name not in self._numbers and self._vacant:
            number = self._vacant.pop(0)
        elif name not in self._numbers:
            is_new = True
            self.names.append(VACANT_NUMBER)
            for of_pool in self.limits.values():
                of_pool.append(of_pool[NO_TENANT])
        self._set(number, name, limits)
        return number, is_new

    def remove(self, name: str) -> int:
        """Record that a tenant is gone; return its number, whose limits are those of the unnamed tenant now."""
        self._config, number = None, self._numbers.pop(name)
        del self.tenants[name]
        insort(self._vacant, number)
        self._set(number, VACANT_NUMBER, {pool: limits[NO_TENANT] for pool, limits in self.limits.items()})
        return number

    def _set(self, number: int, name: str, limits: Mapping[str, tuple[int, int]]) -> None:
        self.names[number] = name
        if name != VACANT_NUMBER:
            self._numbers[name] = number
        for pool, of_pool in self.limits.items():
            self._promised[pool] += limits[pool][1] - of_pool[number][1]
            of_pool[number] = limits[pool]

    def number_of(self, tenant: object) -> int:
        """Return the number of a tenant by its name; None stands for no tenant. O(1). Raises ConfigurationError."""
        if tenant is None:
            return NO_TENANT
        if not isinstance(tenant, str) or tenant not in self._numbers:
            raise ConfigurationError(f"there is no tenant {tenant!r}: they are {list(self.tenants)}")
        return self._numbers[tenant]

    def tenant_of(self, row: int) -> int:
        """Return the tenant of a row."""
        return int(self._state.rows[row, TENANT])

    def by_tenant(self, batch: Int32Array) -> list[tuple[int, Places]]:
        """Return each tenant that has rows in a batch, in order, and the places of its rows. O(rows, sorted)."""
        tenants = self._state.rows[batch, TENANT]
        order = np.argsort(tenants, kind="stable").astype(np.int32)
        found, starts = np.unique(tenants[order], return_index=True)
        return list(zip(found.tolist(), np.split(order, starts[1:]), strict=False))  # no rows are split into one piece

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
        for group in state.all_groups:
            for row in batch[::-1].tolist() if group.pool.name == pool else ():
                num_blocks = blocks_for(int(state.rows[row, group.positions]), group.block_size)
                tenants[group.arrays.table[row, :num_blocks]] = self.tenant_of(row)
        return tenants

    # Questions about needs

    def is_ample(self, batch: Int32Array, num_slots: int) -> bool:
        """Return whether every pool has a block for each of so many slots of each row, within caps and beside floors.

        What tenants need beyond their floors must be free beside what all floors keep. O(rows + tenants).
        """
        count = num_slots * len(self._state.groups) + self._state.most_blocks_beside
        needed = count * np.bincount(self._state.rows[batch, TENANT], minlength=len(self.names))
        for pool in self._state.pools.values():
            accounts = pool.accounts
            kept = np.maximum(0, accounts[:, FLOOR] - accounts[:, NUM_TAKEN])
            if (needed > accounts[:, CAP] - accounts[:, NUM_TAKEN]).any():
                return False
            if np.maximum(0, needed - kept).sum() > pool.num_free - kept.sum():
                return False
        return True

    def find_shortage(self, needs: Needs) -> Shortage | None:
        """Return the shortage of the first pool with too few free blocks for a tenant, if any."""
        for name, pool in self._state.pools.items():
            left = self._left(pool)
            tenant = left.first_too_needy(needs, name)
            if tenant is not None:
                share = replace(self._share(pool, tenant), num_permitted=left.num_permitted(tenant))
                return Shortage(name, int(needs[tenant][name]), pool.num_free, share)
        return None

    def fits_now(self, needs: Needs, *, is_first: bool = True) -> bool:
        """Return whether the pools have enough blocks beside the watermark."""
        return all(
            self._left(pool, self.num_kept(pool, is_first=is_first)).first_too_needy(needs, name) is None
            for name, pool in self._state.pools.items()
        )

    def _left(self, pool: BlockPool, num_kept: int = 0) -> _Left:
        """Return what is left now, less some free blocks that are put aside."""
        num_reserved = tenant_charges.num_reserved(pool.arrays.tenants)
        return _Left(pool.accounts, pool.num_free - num_kept, num_reserved)

    def _fits(self, needs: Needs, pool: BlockPool, in_use: Int32Array) -> bool:
        """Return whether a pool would have enough blocks if only these were in use, each charged as it is now."""
        accounts = pool.accounts.copy()
        accounts[:, NUM_TAKEN] = np.bincount(pool.arrays.tenants[in_use, CHARGED], minlength=len(accounts))
        num_reserved = int(np.maximum(0, accounts[:, FLOOR] - accounts[:, NUM_TAKEN]).sum())
        left = _Left(accounts, pool.num_usable - len(in_use), num_reserved)
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
            floors_of_others = self._promised[name] - limits[tenant][1]
            most[name] = min(limits[tenant][0], self._state.pools[name].num_usable - floors_of_others)
        return most


def charge_to(state: SpaceState, tenant: int) -> None:
    """Charge blocks that are taken from the device pools from now on to this tenant."""
    for pool in state.pools.values():
        pool.charge_to(tenant)


def charge_hits(state: SpaceState, block_ids: Iterable[Int32Array]) -> None:
    """Charge the unreferenced ones of the blocks that are about to be taken, by group, to the paying tenant."""
    for group, blocks in zip(state.groups, block_ids, strict=True):
        tenant_charges.charge_hits(group.pool.arrays, blocks)


def keep_caps(state: SpaceState, tenant: int) -> None:
    """Evict cached blocks of a tenant that has taken hits, down to its caps."""
    for pool in state.pools.values():
        pool.charge_to(tenant)
        victims.keep_cap(pool.arrays, tenant, 0)


def check_tenants(state: SpaceState) -> None:
    """Rows belong to tenants that there are, the others are charged for nothing, and pools have the limits."""
    room = _room_of(state)
    names, tenants = room.names, state.rows[:, TENANT]
    is_known = (tenants >= 0) & (tenants < len(names))
    assert is_known.all(), f"row {is_known.argmin()} is of no tenant"
    removed = [number for number, name in enumerate(names) if name == VACANT_NUMBER]
    assert not np.isin(tenants, removed).any(), "a row is of a removed tenant"
    for name, pool in state.pools.items():
        has = pool.accounts[removed]
        assert not has[:, (NUM_TAKEN, NUM_RESTING)].any(), f"{name}: a removed tenant is charged for blocks"
        limits = [tuple(each) for each in pool.accounts[:, (CAP, FLOOR)].tolist()]
        assert limits == room.limits[name], f"{name}: the limits of tenants are not those of the pool"
    assert not tenants[state.rows[:, STATUS] == VACANT].any(), "a vacant row is a tenant's"


def require_limits(state: SpaceState, name: object, given: object) -> dict[str, tuple[int, int]]:
    """Return cap and floor by pool of a tenant that is to get these limits. Changes nothing.

    Raises:
        ConfigurationError: tenants are not distinguished; no name or no limits; limits that the pools cannot keep;
            a cap below what the tenant has in use.
    """
    room = _room_of(state)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a tenant must have a name, got {name!r}")
    if not isinstance(given, TenantLimits):
        raise ConfigurationError(f"the limits of tenant {name!r} must be TenantLimits, got {given!r}")
    limits = room.require(name, given)
    for pool, (cap, _) in limits.items() if name in room.tenants else ():
        num_taken = int(state.pools[pool].accounts[room.number_of(name), NUM_TAKEN])
        if num_taken > cap:
            raise ConfigurationError(
                f"tenant {name!r} uses {num_taken} blocks of pool {pool!r}, more than a cap of {cap}: free rows of "
                "it first"
            )
    return limits


def require_removable(state: SpaceState, name: object) -> None:
    """Check that a tenant can be removed. Changes nothing.

    Raises:
        ConfigurationError: there is no such tenant, or rows of it are running or swapped out.
    """
    number = _room_of(state).number_of(name)
    if number == NO_TENANT:
        raise ConfigurationError("the unnamed tenant cannot be removed: name a tenant")
    num_rows = int(((state.rows[:, TENANT] == number) & (state.rows[:, STATUS] != VACANT)).sum())
    if num_rows:
        raise ConfigurationError(f"tenant {name!r} has {num_rows} sequences: free them before it is removed")


def _room_of(state: SpaceState) -> TenantRoom:
    if not isinstance(state.room, TenantRoom):
        raise ConfigurationError("tenants are not distinguished: set tenants in the configuration, {} for none yet")
    return state.room


def set_tenant(state: SpaceState, name: str, given: TenantLimits, limits: Mapping[str, tuple[int, int]]) -> None:
    """Add a tenant, or change its limits. At a lower cap its own cached blocks are evicted."""
    with state.changing:
        number, is_new = _room_of(state).add(name, given, limits)
        for pool_name, pool in state.pools.items():
            cap, floor = limits[pool_name]
            if is_new:
                add_account(pool.arrays.tenants, pool.num_blocks, cap, floor)
            else:
                _keep_within(state, pool_name, number, cap)
                set_limits(pool.arrays.tenants, pool.num_blocks, number, cap, floor)


def _keep_within(state: SpaceState, pool_name: str, number: int, cap: int) -> None:
    """Evict cached blocks of a tenant until all of its blocks are within a cap."""
    pool = state.pools[pool_name]
    set_limits(pool.arrays.tenants, pool.num_blocks, number, cap, 0)
    pool.charge_to(number)
    victims.keep_cap(pool.arrays, number, 0)


def remove_tenant(state: SpaceState, name: str) -> None:
    """Remove a tenant without rows; its blocks are charged to the unnamed tenant."""
    with state.changing:
        room = _room_of(state)
        number = room.remove(name)
        for pool_name, pool in state.pools.items():
            move_charges(pool.arrays, number, NO_TENANT)
            set_limits(pool.arrays.tenants, pool.num_blocks, number, *room.limits[pool_name][number])
            pool.charge_to(NO_TENANT)
