"""Tenants that come, go and get other limits while the space is in use.

A tenant's number is its place in the accounts of the pools and in the rows. The number of a removed tenant is given to
the next new one. What a removed tenant is charged for is charged to the unnamed tenant, so nothing is evicted and hits
stay as they are. Content that is to go with its tenant can be dropped first (:meth:`BlockSpace.forget
<pagedkv.BlockSpace.forget>`).
"""

from dataclasses import replace

from pagedkv.blocks import tenant_victims
from pagedkv.blocks.blocks import NO_TENANT
from pagedkv.blocks.tenant_charges import NUM_TAKEN, add_account, move_charges, set_limits
from pagedkv.contract.errors import ConfigurationError
from pagedkv.contract.space_config import SpaceConfig, TenantLimits
from pagedkv.space.state import SpaceState
from pagedkv.space.tenants import VACANT_NUMBER, TenantRoom
from pagedkv.tables.rows import STATUS, TENANT, VACANT

__all__ = ["config_with", "config_without", "remove_tenant", "set_tenant"]


def config_with(state: SpaceState, name: object, limits: object) -> SpaceConfig:
    """Return the configuration in which a tenant has these limits.

    Raises:
        ConfigurationError: tenants are not distinguished; no name or no limits; limits that the pools cannot keep;
            a cap below what the tenant has in use.
    """
    tenants = _require_tenants(state)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a tenant must have a name, got {name!r}")
    if not isinstance(limits, TenantLimits):
        raise ConfigurationError(f"the limits of tenant {name!r} must be TenantLimits, got {limits!r}")
    config = replace(state.config, tenants={**tenants, name: limits})
    if name in tenants:
        number = state.room.number_of(name)
        place = list(config.tenants or {}).index(name) + 1
        for pool, all_limits in config.limits_by_pool().items():
            num_taken, cap = int(state.pools[pool].accounts[number, NUM_TAKEN]), all_limits[place][0]
            if num_taken > cap:
                raise ConfigurationError(
                    f"tenant {name!r} uses {num_taken} blocks of pool {pool!r}, more than a cap of {cap}: free rows of "
                    "it first"
                )
    return config


def config_without(state: SpaceState, name: object) -> SpaceConfig:
    """Return the configuration without a tenant.

    Raises:
        ConfigurationError: there is no such tenant, or rows of it are running or swapped out.
    """
    tenants = _require_tenants(state)
    number = state.room.number_of(name)
    if number == NO_TENANT:
        raise ConfigurationError("the unnamed tenant cannot be removed: name a tenant")
    num_rows = int(((state.rows[:, TENANT] == number) & (state.rows[:, STATUS] != VACANT)).sum())
    if num_rows:
        raise ConfigurationError(f"tenant {name!r} has {num_rows} sequences: free them before it is removed")
    return replace(state.config, tenants={other: limits for other, limits in tenants.items() if other != name})


def _require_tenants(state: SpaceState) -> dict[str, TenantLimits]:
    if state.config.tenants is None:
        raise ConfigurationError("tenants are not distinguished: set tenants in the configuration, {} for none yet")
    return dict(state.config.tenants)


def _room_of(state: SpaceState) -> TenantRoom:
    assert isinstance(state.room, TenantRoom), "tenants are not distinguished"
    return state.room


def set_tenant(state: SpaceState, name: str, config: SpaceConfig) -> None:
    """Add a tenant, or change its limits, as a configuration says. At a lower cap its own cached blocks are evicted."""
    state.is_changing = True
    room = _room_of(state)
    names = list(room.names)
    is_new = name not in names
    number = names.index(VACANT_NUMBER) if is_new and VACANT_NUMBER in names else len(names)
    number = number if is_new else names.index(name)
    has_rows = number < len(names)
    if has_rows:
        names[number] = name
    else:
        names.append(name)
    room.take(tuple(names), config)
    for pool_name, pool in state.pools.items():
        cap, floor = room.limits[pool_name][number]
        if has_rows:
            _keep_within(state, pool_name, number, cap)
            set_limits(pool.arrays.tenants, pool.num_blocks, number, cap, floor)
        else:
            add_account(pool.arrays.tenants, pool.num_blocks, cap, floor)
    state.is_changing = False


def _keep_within(state: SpaceState, pool_name: str, number: int, cap: int) -> None:
    """Evict cached blocks of a tenant until all of its blocks are within a cap."""
    pool = state.pools[pool_name]
    set_limits(pool.arrays.tenants, pool.num_blocks, number, cap, 0)
    pool.charge_to(number)
    tenant_victims.keep_cap(pool.arrays, number, 0)


def remove_tenant(state: SpaceState, name: str, config: SpaceConfig) -> None:
    """Remove a tenant without rows; its blocks are charged to the unnamed tenant."""
    state.is_changing = True
    room = _room_of(state)
    number, names = room.number_of(name), list(room.names)
    names[number] = VACANT_NUMBER
    room.take(tuple(names), config)
    for pool_name, pool in state.pools.items():
        move_charges(pool.arrays, number, NO_TENANT)
        set_limits(pool.arrays.tenants, pool.num_blocks, number, *room.limits[pool_name][number])
        pool.charge_to(NO_TENANT)
    state.is_changing = False
