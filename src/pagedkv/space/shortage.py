"""Whether there are enough free blocks for an operation. Nothing here changes anything.

The needs of an operation are given by tenant and pool (:data:`Needs`). A space without tenants has a :class:`Room`, in
which all blocks are for :data:`~pagedkv.blocks.blocks.NO_TENANT`. A space with tenants has a room of its own in
its place, which counts each one's share (:mod:`pagedkv.space.tenants`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import FREE, NO_TENANT, NUM_FREE, QUEUE
from pagedkv.contract.answers import Shortage, TenantShare
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.errors import ConfigurationError

if TYPE_CHECKING:
    from pagedkv.space.state import SpaceState

__all__ = ["Arrival", "Needs", "Places", "Room"]

Needs: TypeAlias = Mapping[int, Mapping[str, int]]
"""Free blocks that an operation takes, by the number of a tenant and the name of a device pool."""
Places: TypeAlias = Int32Array | slice
"""Places in a batch of rows."""


class Arrival(NamedTuple):
    """What swapping a batch in takes, by tenant and pool.

    Args:
        num_taken: free blocks; num_distinct: blocks that would be taken if the pools held nothing.
        twins: cached blocks that are shared instead of copied: int32 ``[any]``; none where it makes no difference.
    """

    num_taken: dict[int, dict[str, int]]
    num_distinct: dict[int, dict[str, int]]
    twins: dict[int, dict[str, Int32Array]]


class Room:
    """The free blocks of a space, and for which tenants they are: here for none in particular.

    Attributes:
        names: names of the tenants by number, first None, for sequences without a tenant; empty without tenants.
    """

    names: Sequence[str | None] = ()

    def __init__(self, state: "SpaceState") -> None:
        """Use the state of a space. O(1)."""
        self._state = state

    # Tenants

    @property
    def config(self) -> SpaceConfig:
        """The space's configuration, with the tenants that there are now."""
        return self._state.config

    def number_of(self, tenant: object) -> int:
        """Return the number of a tenant by its name; None stands for no tenant. Raises ConfigurationError."""
        if tenant is None:
            return NO_TENANT
        raise ConfigurationError(f"there is no tenant {tenant!r}: set tenants in the configuration")

    def tenant_of(self, row: int) -> int:
        """Return the tenant of a row."""
        del row
        return NO_TENANT

    def by_tenant(self, batch: Int32Array) -> list[tuple[int, Places]]:
        """Return each tenant that has rows in a batch, in order, and the places of its rows."""
        del batch
        return [(NO_TENANT, slice(None))]

    def by_arrival(
        self, batch: Int32Array, num_taken: dict[str, int], num_distinct: dict[str, int], places: dict[str, Int32Array]
    ) -> Arrival:
        """Divide what a batch takes when it is swapped in, by tenant.

        Args:
            batch: the rows.
            num_taken, num_distinct: what all of it takes, by pool.
            places: the destination of each block of the host pools (:func:`~pagedkv.tables.swapping.survey`).
        """
        del batch, places
        return Arrival({NO_TENANT: num_taken}, {NO_TENANT: num_distinct}, {})

    # Questions about needs

    def is_ample(self, batch: Int32Array, count: int) -> bool:
        """Return whether every pool has so many free blocks for each row of a batch: a quick bound. O(pools)."""
        return all(len(batch) * count <= counts[NUM_FREE] for counts in self._state.pool_counts)

    def find_shortage(self, needs: Needs) -> Shortage | None:
        """Return the shortage of the first pool with too few free blocks, or too few for a tenant, if any."""
        for name, count in needs[NO_TENANT].items():
            num_free = self._state.pools[name].num_free
            if count > num_free:
                return Shortage(name, int(count), num_free)
        return None

    def fits_now(self, needs: Needs) -> bool:
        """Return whether the pools have enough blocks beside the watermark."""
        return all(count <= self.spare(self._state.pools[name], NO_TENANT) for name, count in needs[NO_TENANT].items())

    def fits_empty_pools(self, needs: Needs) -> bool:
        """Return whether empty pools would have enough blocks, within the caps and beside the floors of others."""
        return all(self._fits(needs, pool, np.zeros(0, np.int32)) for pool in self._state.pools.values())

    def fits_beside(self, needs: Needs, shared: Mapping[str, Int32Array]) -> bool:
        """Return whether pools that hold nothing but the shared blocks in use would have enough blocks.

        An operation need not take blocks that it shares, so it can succeed where an empty pool would be too small. If
        the needs fit now, they fit here too.

        Args:
            needs: what is to be taken, including those of the shared blocks that are free.
            shared: the blocks that are shared, by pool: int32 ``[any]``, in any order, repeats allowed.
        """
        for name, pool in self._state.pools.items():
            in_use = np.unique(shared[name][pool.arrays.records[shared[name], QUEUE] != FREE])
            if not self._fits(needs, pool, in_use):
                return False
        return True

    def _fits(self, needs: Needs, pool: BlockPool, in_use: Int32Array) -> bool:
        """Return whether a pool would have enough blocks if only these were in use: int32 ``[any]``."""
        return needs[NO_TENANT][pool.name] <= pool.num_usable - len(in_use)

    def spare(self, pool: BlockPool, tenant: int) -> int:
        """Count the blocks that an admission may take for a tenant, beside what the watermark keeps free."""
        del tenant
        return pool.num_free - self.num_kept(pool)

    def num_kept(self, pool: BlockPool) -> int:
        """Count the blocks that admissions leave free: the watermark, or 0 for a pool with no block in use."""
        if pool.num_free == pool.num_usable:
            return 0
        return int(self._state.config.watermark * pool.num_usable)

    # Shares

    def shares(self) -> tuple[TenantShare, ...]:
        """List what each tenant has of each device pool, pool by pool; empty without tenants."""
        return ()

    def shares_of(self, tenant: int) -> tuple[TenantShare, ...]:
        """List what a tenant has of each device pool; empty without tenants."""
        del tenant
        return ()

    def counts_of(self, pool: BlockPool) -> Int32Array:
        """Count what each tenant has of a pool: int32 ``[tenants, 2]``, blocks in use or deferred, and cached ones."""
        del pool
        return np.zeros((1, 2), np.int32)

    def most_blocks(self, tenant: int) -> dict[str, int]:
        """Count, by pool, the blocks that a tenant can have at most: its cap, or what others' floors leave."""
        del tenant
        return {name: pool.num_usable for name, pool in self._state.pools.items()}
