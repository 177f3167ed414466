"""Whether there are enough free blocks, in a pool or within a tenant's share of it. Nothing here changes anything.

The needs of an operation are given by tenant and pool (:data:`Needs`); without tenants, tenant 0 has them all. If an
operation takes blocks for several tenants, each must find enough beside the others. Their order makes no difference,
since the blocks that a floor reserves are free for its tenant alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from pagedkv.memory.contract.answers import Shortage
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.block_pool import BlockPool
from pagedkv.memory.pool.blocks import CHARGED, FREE, QUEUE
from pagedkv.memory.pool.tenant_charges import NO_TENANT, NUM_TAKEN
from pagedkv.memory.space.state import SpaceState
from pagedkv.memory.space.tenants import share_of

__all__ = ["Needs", "find_shortage", "fits_beside", "fits_empty_pools", "fits_now", "kept_free", "spare_room"]

Needs: TypeAlias = Mapping[int, Mapping[str, int]]
"""Free blocks that an operation takes, by the number of a tenant and the name of a device pool."""


class _Room:
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

    def take(self, tenant: int, count: int) -> None:
        """Take blocks for a tenant."""
        self._num_taken[tenant] += count
        self._num_free -= count


def _room_now(state: SpaceState, pool: BlockPool, num_kept: int = 0) -> _Room:
    """Return what is left now, less some free blocks that are put aside."""
    return _Room(state.limits[pool.name], pool.accounts[:, NUM_TAKEN].tolist(), pool.num_free - num_kept)


def _first_too_needy(room: _Room, needs: Needs, pool: str) -> int | None:
    """Take for each tenant what it needs of a pool; return the first tenant for which there is too little."""
    for tenant in sorted(needs):
        count = needs[tenant][pool]
        if count > room.num_permitted(tenant):
            return tenant
        room.take(tenant, count)
    return None


def find_shortage(state: SpaceState, needs: Needs) -> Shortage | None:
    """Return the shortage of the first pool with too few free blocks, or too few for a tenant, if any."""
    for name, pool in state.pools.items():
        if not state.tenant_names:
            count = needs[NO_TENANT][name]
            if count > pool.num_free:
                return Shortage(name, count, pool.num_free)
            continue
        room = _room_now(state, pool)
        tenant = _first_too_needy(room, needs, name)
        if tenant is not None:
            share = replace(share_of(state, pool, tenant), num_permitted=room.num_permitted(tenant))
            return Shortage(name, needs[tenant][name], pool.num_free, share)
    return None


def fits_empty_pools(state: SpaceState, needs: Needs) -> bool:
    """Return whether empty pools would have enough blocks, within the caps and beside the floors of other tenants."""
    none_taken = [0] * len(state.tenant_names)
    return all(_has_room(state, needs, name, 0, none_taken) for name in state.pools)


def fits_beside(state: SpaceState, needs: Needs, shared: Mapping[str, Int32Array]) -> bool:
    """Return whether pools that hold nothing but the shared blocks in use would have enough blocks.

    An operation need not take blocks that it shares, so it can succeed where an empty pool would be too small. If the
    needs fit now, they fit here too.

    Args:
        state: the space.
        needs: what is to be taken, including those of the shared blocks that are free.
        shared: the blocks that are shared, by pool: int32 ``[any]``, in any order, repeats allowed.
    """
    for name, pool in state.pools.items():
        in_use = np.unique(shared[name][pool.arrays.records[shared[name], QUEUE] != FREE])
        if not _has_room(state, needs, name, len(in_use), _num_charged(state, pool, in_use)):
            return False
    return True


def _num_charged(state: SpaceState, pool: BlockPool, blocks: Int32Array) -> list[int]:
    """Count the blocks, among the given ones, that are charged to each tenant."""
    if not state.tenant_names:
        return []
    counts = np.bincount(pool.arrays.tenants[blocks, CHARGED], minlength=len(state.tenant_names))
    return [int(count) for count in counts]


def _has_room(state: SpaceState, needs: Needs, name: str, num_in_use: int, num_taken: list[int]) -> bool:
    """Return whether a pool would have enough blocks beside ``num_in_use`` ones, ``num_taken`` of each tenant."""
    num_free = state.pools[name].num_usable - num_in_use
    if not state.tenant_names:
        return needs[NO_TENANT][name] <= num_free
    return _first_too_needy(_Room(state.limits[name], num_taken, num_free), needs, name) is None


def fits_now(state: SpaceState, needs: Needs) -> bool:
    """Return whether the pools have enough blocks beside the watermark."""
    for name, pool in state.pools.items():
        if not state.tenant_names:
            if needs[NO_TENANT][name] > spare_room(state, pool, NO_TENANT):
                return False
            continue
        if _first_too_needy(_room_now(state, pool, kept_free(state, pool)), needs, name) is not None:
            return False
    return True


def spare_room(state: SpaceState, pool: BlockPool, tenant: int) -> int:
    """Count the blocks that an admission may take for a tenant, beside what the watermark keeps free."""
    if not state.tenant_names:
        return pool.num_free - kept_free(state, pool)
    return _room_now(state, pool, kept_free(state, pool)).num_permitted(tenant)


def kept_free(state: SpaceState, pool: BlockPool) -> int:
    """Return the blocks that admissions leave free: the watermark, or 0 for a pool with no block in use."""
    if pool.num_free == pool.num_usable:
        return 0
    return int(state.config.watermark * pool.num_usable)
