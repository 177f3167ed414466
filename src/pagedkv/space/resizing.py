"""Pools that change their size: blocks whose memory is given back become absent, and come back later.

A pool has arrays for all blocks that it can ever have, ``SpaceConfig.num_blocks``, so growing and shrinking move
nothing and no address changes; an absent block is in no list, and no loop meets it. Whether a prompt fits NEVER is
judged by all blocks, and what fits now by those that are there.

Memory is given back in pieces that a device can release: *runs* of adjacent blocks, the first of which is the null
block's. Of the runs without a block in use, those are given back whose last block would be allocated first; with runs
of one block that is the order of eviction itself::

    blocks  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13     runs of 4: blocks 0 to 3, and the rest at the end, always stay
"""

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.life_cycle import bring_back, take_away
from pagedkv.blocks.record import ABSENT, CHARGED, NAME, NULL_BLOCK, QUEUE
from pagedkv.blocks.tenant_charges import FLOOR, NUM_TAKEN, accounts_of, num_reserved
from pagedkv.contract.answers import BlockHolders
from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.errors import ConfigurationError
from pagedkv.space.loading import num_held
from pagedkv.space.rows import LOST, RUNNING, STATUS
from pagedkv.space.state import SpaceState

Value = TypeVar("Value", bound=np.generic)

IN_PLACE: Final = 2**31 - 1
"""The place in the order of allocation of a block that cannot be given back."""


def as_runs(pool: BlockPool, num_blocks: object, run: object) -> tuple[int, int]:
    """Check a number of blocks; return the number of runs, and the blocks of each. Raises ConfigurationError."""
    size = as_count(run, "run", least=1)
    count = as_count(num_blocks, "num_blocks")
    if count % size:
        raise ConfigurationError(f"{count} blocks of pool {pool.name!r} are no whole runs of {size} blocks")
    return count // size, size


def shrink(state: SpaceState, pool: BlockPool, num_runs: int, run: int) -> Int32Array | BlockHolders:
    """Make blocks absent, or return what keeps them, with nothing changed."""
    last_places = _by_run(_places(pool), run).max(axis=1)
    order = np.argsort(last_places, kind="stable")
    order = order[last_places[order] < IN_PLACE]
    reserved = num_reserved(pool.arrays.tenants) if len(pool.arrays.tenants) else 0
    num_available = min(len(order), max(0, pool.num_free - reserved) // run)
    if num_runs > num_available:
        return _holders(state, pool, num_runs * run, num_available * run)
    blocks = _blocks_of(order[:num_runs], run)
    with state.changing:
        take_away(pool.arrays, blocks)
    return blocks


def grow(state: SpaceState, pool: BlockPool, num_runs: int, run: int) -> Int32Array:
    """Make absent blocks free, the lowest ones. Raises ConfigurationError if there are not so many, in whole runs."""
    is_absent = pool.arrays.records[: pool.num_blocks, QUEUE] == ABSENT
    runs = np.flatnonzero(_by_run(is_absent, run).all(axis=1))
    if num_runs > len(runs):
        raise ConfigurationError(
            f"pool {pool.name!r} cannot grow by {num_runs * run} blocks: of its {pool.num_blocks} blocks "
            f"{pool.num_absent} are absent, {len(runs) * run} of them in whole runs of {run}"
        )
    blocks = _blocks_of(runs[:num_runs], run)
    with state.changing:
        bring_back(pool.arrays, blocks)
    return blocks


def _places(pool: BlockPool) -> Int64Array:
    """Return for each block its place in the order of allocation; IN_PLACE if it cannot be given back."""
    arrays = pool.arrays
    order = np.array(pool.free_queue.get_all_free_blocks(), np.int64)
    places = np.full(pool.num_blocks, IN_PLACE, np.int64)
    places[order] = np.arange(len(order))
    if len(arrays.tenants):  # of each tenant, the cached blocks that its floor keeps are those evicted last
        cached = order[arrays.records[order, NAME] > 0]
        for tenant, account in enumerate(accounts_of(arrays.tenants, pool.num_blocks)):
            num_kept = max(0, int(account[FLOOR]) - int(account[NUM_TAKEN]))
            own = cached[arrays.tenants[cached, CHARGED] == tenant]
            places[own[max(0, len(own) - num_kept) :]] = IN_PLACE
    return places


def _by_run(of_blocks: npt.NDArray[Value], run: int) -> npt.NDArray[Value]:
    """Arrange something of each block by runs, ``[runs, run]``; without those that always stay the array is shorter."""
    num_runs = len(of_blocks) // run
    return of_blocks[: num_runs * run].reshape(num_runs, run)


def _blocks_of(runs: npt.NDArray[np.intp], run: int) -> Int32Array:
    if not len(runs):  # so of runs that are longer than the pool, which take no memory then
        return np.zeros(0, np.int32)
    return (runs[:, None] * run + np.arange(run)).ravel().astype(np.int32)


def _holders(state: SpaceState, pool: BlockPool, num_wanted: int, num_available: int) -> BlockHolders:
    """Count the blocks that each row holds. O(rows x width of the tables)."""
    rows = np.flatnonzero(np.isin(state.rows[:, STATUS], (RUNNING, LOST)))
    held: list[set[int]] = [set() for _ in rows]
    for table in state.tables:
        if table.pool is pool:
            for place, row in enumerate(rows.tolist()):
                held[place].update(table.arrays.table[row].tolist())
    counts = np.array([len(blocks - {NULL_BLOCK}) for blocks in held], np.int32)
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] > 0]
    return BlockHolders(
        pool.name,
        num_wanted,
        num_available,
        rows[order].astype(np.int32),
        counts[order],
        num_held(state, pool.name),
        pool.num_deferred,
    )
