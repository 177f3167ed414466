"""Statistics: a frozen snapshot of every pool, taken only when it is requested."""

from dataclasses import dataclass

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.record import (
    NUM_ABSENT,
    NUM_ACQUIRED,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_EVICTED,
    NUM_FREE,
    NUM_HIT_BLOCKS,
    NUM_LEASED,
    NUM_NAMED,
)
from pagedkv.contract.answers import Receipt, TenantShare
from pagedkv.space.loading import num_held
from pagedkv.space.rows import NUM_TOKENS, RUNNING, STATUS, SWAPPED
from pagedkv.space.state import SpaceState


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One pool at one moment; ``num_acquired``, ``num_evictions`` and ``num_hit_blocks`` count since it was built.

    Args:
        name: name of the pool; a host pool has the name of its device pool.
        num_blocks: usable blocks (without the null block), absent ones included.
        num_free: blocks that can be handed out now, cached ones included.
        num_cached: free blocks whose content can still be hit.
        num_deferred: unreferenced blocks that wait for a step.
        num_in_use: blocks that tables or tickets refer to.
        num_held: of these, blocks that tickets hold.
        num_named: blocks in the prefix index, in use or free.
        num_acquired: blocks handed out.
        num_evictions: of these, blocks that had cached content.
        num_hit_blocks: references given to cached blocks.
        nbytes: host memory of the bookkeeping.
        num_leased: of the free blocks, those that leases keep.
        num_absent: blocks whose memory was given back.
    """

    name: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_deferred: int
    num_in_use: int
    num_held: int
    num_named: int
    num_acquired: int
    num_evictions: int
    num_hit_blocks: int
    nbytes: int
    num_leased: int = 0
    num_absent: int = 0


@dataclass(frozen=True, slots=True)
class SpaceStatistics:
    """A block space at one moment.

    Args:
        pools: device pools; host_pools: host pools.
        num_running: sequences with blocks on the device; num_swapped: with blocks in the host pool.
        num_tokens: tokens of the running sequences.
        num_steps_in_flight: planned steps that are not acknowledged.
        receipts: the sum of all receipts since the space was built, including those of freed sequences. None unless
            ``SpaceConfig.receipts``.
        tenants: what each tenant has of each device pool, first the share without a tenant; empty unless
            ``SpaceConfig.tenants``.
    """

    pools: tuple[PoolStatistics, ...]
    host_pools: tuple[PoolStatistics, ...]
    num_running: int
    num_swapped: int
    num_tokens: int
    num_steps_in_flight: int
    receipts: Receipt | None
    tenants: tuple[TenantShare, ...]


def take_statistics(state: SpaceState, num_steps_in_flight: int) -> SpaceStatistics:
    """Take the statistics. O(rows + blocks held)."""
    running = state.rows[:, STATUS] == RUNNING
    return SpaceStatistics(
        pools=tuple(_of_pool(pool, num_held(state, pool.name)) for pool in state.pools.values()),
        host_pools=tuple(_of_pool(pool, 0) for pool in state.host_pools.values()),
        num_running=int(running.sum()),
        num_swapped=int((state.rows[:, STATUS] == SWAPPED).sum()),
        num_tokens=int(state.rows[running, NUM_TOKENS].sum()),
        num_steps_in_flight=num_steps_in_flight,
        receipts=None if state.receipts is None else state.receipts.sum,
        tenants=state.room.shares(),
    )


def _of_pool(pool: BlockPool, num_held: int) -> PoolStatistics:
    counts = pool.arrays.counts.tolist()
    return PoolStatistics(
        name=pool.name,
        num_blocks=pool.num_usable,
        num_free=counts[NUM_FREE],
        num_cached=counts[NUM_CACHED],
        num_deferred=counts[NUM_DEFERRED],
        num_in_use=pool.num_present - counts[NUM_FREE] - counts[NUM_DEFERRED],
        num_held=num_held,
        num_named=counts[NUM_NAMED],
        num_acquired=counts[NUM_ACQUIRED],
        num_evictions=counts[NUM_EVICTED],
        num_hit_blocks=counts[NUM_HIT_BLOCKS],
        nbytes=pool.nbytes,
        num_leased=counts[NUM_LEASED],
        num_absent=counts[NUM_ABSENT],
    )
