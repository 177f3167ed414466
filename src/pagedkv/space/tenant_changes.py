"""Tenants that come, go and get other limits while the space is in use.

A tenant's number is its place in the accounts of the pools and in the rows. The number of a removed tenant is given to
the next new one. What a removed tenant is charged for is charged to the unnamed tenant, so nothing is evicted and hits
stay as they are. Content that is to go with its tenant can be dropped first (:meth:`BlockSpace.forget
<pagedkv.BlockSpace.forget>`).
"""

from collections.abc import Mapping

from pagedkv.blocks import tenant_victims
from pagedkv.blocks.blocks import NO_TENANT
from pagedkv.blocks.tenant_charges import NUM_TAKEN, add_account, move_charges, set_limits
from pagedkv.contract.space_config import TenantLimits
from pagedkv.errors import ConfigurationError
from pagedkv.space.state import SpaceState
from pagedkv.space.tenants import TenantRoom
from pagedkv.tables.rows import STATUS, TENANT, VACANT

__all__ = ["remove_tenant", "require_limits", "require_removable", "set_tenant"]


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
    state.is_changing = True
    number, is_new = _room_of(state).add(name, given, limits)
    for pool_name, pool in state.pools.items():
        cap, floor = limits[pool_name]
        if is_new:
            add_account(pool.arrays.tenants, pool.num_blocks, cap, floor)
        else:
            _keep_within(state, pool_name, number, cap)
            set_limits(pool.arrays.tenants, pool.num_blocks, number, cap, floor)
    state.is_changing = False


def _keep_within(state: SpaceState, pool_name: str, number: int, cap: int) -> None:
    """Evict cached blocks of a tenant until all of its blocks are within a cap."""
    pool = state.pools[pool_name]
    set_limits(pool.arrays.tenants, pool.num_blocks, number, cap, 0)
    pool.charge_to(number)
    tenant_victims.keep_cap(pool.arrays, number, 0)


def remove_tenant(state: SpaceState, name: str) -> None:
    """Remove a tenant without rows; its blocks are charged to the unnamed tenant."""
    state.is_changing = True
    room = _room_of(state)
    number = room.remove(name)
    for pool_name, pool in state.pools.items():
        move_charges(pool.arrays, number, NO_TENANT)
        set_limits(pool.arrays.tenants, pool.num_blocks, number, *room.limits[pool_name][number])
        pool.charge_to(NO_TENANT)
    state.is_changing = False
