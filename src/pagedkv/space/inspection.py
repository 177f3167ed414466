"""SpaceInspection: the blocks of a running space one by one, for live views.

It is an observer, which counts where the hits of prompts end, and it reads maps of pools, single blocks and the chains
of cached blocks on request. A space without one pays nothing for it. All arrays that it returns are copies, so that a
view can use them while the space goes on.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import final

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.record import (
    ABSENT,
    CHARGED,
    DEFERRED,
    HIGH_PRIORITY,
    LIFE,
    NAME,
    NULL_BLOCK,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_FREE,
    NUM_LEASED,
    PARENT,
    PARENT_LIFE,
    QUEUE,
    REF_COUNT,
)
from pagedkv.contract.arrays import Int32Array, Uint8Array
from pagedkv.errors import BlockError, ConfigurationError
from pagedkv.space import stored_blocks
from pagedkv.space.hits import PrefixHit
from pagedkv.space.observer import SpaceObserver
from pagedkv.space.rows import AT, NUM_BLOCKS, RUNNING, STATUS
from pagedkv.space.space_view import ObservedSpace
from pagedkv.space.state import SpaceState


class BlockState(IntEnum):
    """What a block is at one moment; each block has one state."""

    NULL = 0
    FREE = 1
    """It can be allocated, and has no content."""
    CACHED = 2
    """It can be allocated, and its content can be hit."""
    LEASED = 3
    """As CACHED, with a lease or high priority."""
    LIVE = 4
    """Tables or tickets refer to it."""
    DEFERRED = 5
    """No reference is left, and a step in flight may still use it."""
    ABSENT = 6
    """Its memory was given back."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks of one pool by state, the null block left out; the names are those of :class:`BlockState`."""

    num_free: int
    num_cached: int
    num_leased: int
    num_live: int
    num_deferred: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolMap:
    """The state of every block of one device pool at one moment.

    Args:
        pool: name of the pool.
        states: uint8 ``[num_blocks]``, numbers of :class:`BlockState`.
        tenants: int32 ``[num_blocks]``, the number of the tenant to which each block with content is charged; 0: none.
    """

    pool: str
    states: Uint8Array
    tenants: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class BlockDetails:
    """One block at one moment.

    Args:
        pool: name of its pool; block_id: its id; state: its state.
        tenant: the tenant to which it is charged, or None.
        group: index of the group of its name, or None without a name.
        parent: the block before it, or None if it is a first one, or if its parent's content is gone.
        digest: SHA-256 of its chain, or None without a name.
        token_ids: int32, its tokens; empty without a name.
        ref_count: table entries and tickets that refer to it; rows: running rows with it in their tables.
        num_lives: how often its content was lost so far.
        num_hits: hits of prompts that ended with it, since the inspection began or since its content was lost.
        lease_end_s: when its lease ends, in seconds of the space's clock; inf for high priority; None without a lease.
    """

    pool: str
    block_id: int
    state: BlockState
    tenant: str | None
    group: int | None
    parent: int | None
    digest: bytes | None
    token_ids: Int32Array
    ref_count: int
    rows: tuple[int, ...]
    num_lives: int
    num_hits: int
    lease_end_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefixes:
    """The chains of named blocks of one pool, in use or free, in the order of the blocks' ids.

    Args:
        pool: name of the pool; block_sizes: tokens of a block of each group.
        block_ids: int32 ``[n]``; groups: int32 ``[n]``, the group of each.
        parents: int32 ``[n]``, the place in these arrays of the block before each; -1 for a first block, and where the
            parent's content is gone.
        num_hits: int32 ``[n]``, hits of prompts that ended with it, since the inspection began.
        tenants: int32 ``[n]``; is_live: bool ``[n]``.
    """

    pool: str
    block_sizes: tuple[int, ...]
    block_ids: Int32Array
    groups: Int32Array
    parents: Int32Array
    num_hits: Int32Array
    tenants: Int32Array
    is_live: np.typing.NDArray[np.bool_]


@final
class SpaceInspection(SpaceObserver):
    """Reads the blocks of a space, and counts where hits end. Register it with ``BlockSpace.observe``."""

    def __init__(self) -> None:
        self._own_state: SpaceState | None = None
        self._hits: dict[str, Int32Array] = {}

    def begin(self, space: ObservedSpace) -> None:
        """Use the state of the space. O(blocks)."""
        state = space._own_state  # noqa: SLF001 - of this room
        self._own_state = state
        self._hits = {name: np.zeros((pool.num_blocks, 2), np.int32) for name, pool in state.pools.items()}

    def admitted(self, row: int, hit: PrefixHit, num_reached: int) -> None:  # noqa: ARG002 - a moment's arguments
        """Count a hit at the last block of each group. O(groups)."""
        for group, blocks in zip(self._state.groups, hit.block_ids, strict=True):
            if len(blocks):
                last = int(blocks[-1])
                life = int(group.pool.arrays.records[last, LIFE])
                counts = self._hits[group.pool.name]
                num_before = int(counts[last, 0]) if counts[last, 1] == life else 0
                counts[last] = num_before + 1, life

    # Questions

    @property
    def tenant_names(self) -> tuple[str | None, ...]:
        """Names of the tenants by number: first None, no tenant."""
        return tuple(self._state.room.names) or (None,)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Names of the device pools."""
        return tuple(self._state.pools)

    def counts(self, pool: str) -> PoolCounts:
        """Count the blocks of a pool by state. O(1). Raises ConfigurationError."""
        counts = self._pool(pool).arrays.counts
        num_free, num_cached, num_leased = int(counts[NUM_FREE]), int(counts[NUM_CACHED]), int(counts[NUM_LEASED])
        num_deferred = int(counts[NUM_DEFERRED])
        num_live = self._pool(pool).num_present - num_free - num_deferred
        return PoolCounts(num_free - num_cached, num_cached - num_leased, num_leased, num_live, num_deferred)

    def shares(self, pool: str) -> Int32Array:
        """Return what each tenant has of a pool: int32 ``[tenants, 2]``, blocks in use or deferred, and cached ones.

        Without tenants one row of zeros. O(tenants). Raises ConfigurationError.
        """
        return self._state.room.counts_of(self._pool(pool))

    def map(self, pool: str) -> PoolMap:
        """Copy the state of every block of a pool. O(blocks), about 10 ns each. Raises ConfigurationError."""
        owner = self._pool(pool)
        arrays, num_blocks = owner.arrays, owner.num_blocks
        is_named, ref_counts, places = arrays.records[:num_blocks, (NAME, REF_COUNT, QUEUE)].T
        states = np.full(num_blocks, BlockState.FREE, np.uint8)
        states[is_named > 0] = BlockState.CACHED
        if len(arrays.leases):
            states[(is_named > 0) & (arrays.leases > 0)] = BlockState.LEASED
        states[places == DEFERRED] = BlockState.DEFERRED
        states[places == ABSENT] = BlockState.ABSENT
        states[ref_counts > 0] = BlockState.LIVE
        states[NULL_BLOCK] = BlockState.NULL
        tenants = np.zeros(num_blocks, np.int32)
        if len(arrays.tenants):
            np.copyto(
                tenants,
                arrays.tenants[:num_blocks, CHARGED],
                where=(states > BlockState.FREE) & (states < BlockState.ABSENT),
            )
        return PoolMap(pool, states, tenants)

    def block(self, pool: str, block_id: int) -> BlockDetails:
        """Return everything about one block. O(rows x width of the tables) for a live block, else O(block size).

        Raises:
            ConfigurationError: there is no such pool.
            BlockError: the null block, or an id outside the pool.
        """
        owner = self._pool(pool)
        if not 0 < block_id < owner.num_blocks:
            raise BlockError(f"block {block_id} is not one of the blocks 1..{owner.num_blocks - 1} of pool {pool!r}")
        arrays, record = owner.arrays, owner.arrays.records[block_id]
        known = owner.block(block_id)
        stored = None
        if known.digest is not None and known.group is not None:
            stored = stored_blocks.look_up(self._state, self._state.groups[known.group], known.digest)
        parent = int(record[PARENT])
        has_parent = known.group is not None and parent != NULL_BLOCK
        has_parent = has_parent and bool(arrays.records[parent, LIFE] == record[PARENT_LIFE])
        is_stored = stored is not None and stored.block_id == block_id
        return BlockDetails(
            pool=pool,
            block_id=block_id,
            state=self._state_of(owner, block_id),
            tenant=self._tenant_of(owner, block_id),
            group=known.group,
            parent=parent if has_parent else None,
            digest=known.digest,
            token_ids=stored.token_ids if is_stored and stored is not None else np.zeros(0, np.int32),
            ref_count=known.ref_count,
            rows=self._rows_of(owner, block_id) if known.ref_count else (),
            num_lives=int(record[LIFE]),
            num_hits=int(self._hits_of(owner, np.array([block_id]))[0]),
            lease_end_s=_lease_end_s(owner, block_id),
        )

    def prefixes(self, pool: str) -> CachedPrefixes:
        """Copy the chains of all named blocks of a pool. O(blocks), about 50 ns each. Raises ConfigurationError."""
        owner = self._pool(pool)
        records = owner.arrays.records
        blocks = np.sort(owner.prefix_index.named_blocks()).astype(np.int32)
        parents = records[blocks, PARENT]
        places = np.full(owner.num_blocks, -1, np.int32)
        places[blocks] = np.arange(len(blocks), dtype=np.int32)
        has_parent = (parents != NULL_BLOCK) & (records[parents, LIFE] == records[blocks, PARENT_LIFE])
        tenants = owner.arrays.tenants
        return CachedPrefixes(
            pool,
            tuple(group.block_size for group in self._state.groups),
            blocks,
            records[blocks, NAME] - 1,
            np.where(has_parent, places[parents], -1).astype(np.int32),
            self._hits_of(owner, blocks),
            tenants[blocks, CHARGED] if len(tenants) else np.zeros(len(blocks), np.int32),
            records[blocks, REF_COUNT] > 0,
        )

    @property
    def _state(self) -> SpaceState:
        assert self._own_state is not None, "an inspection of no space"
        return self._own_state

    def _pool(self, name: str) -> BlockPool:
        pool = self._state.pools.get(name)
        if pool is None:
            raise ConfigurationError(f"there is no pool {name!r}: the pools are {list(self._state.pools)}")
        return pool

    def _hits_of(self, pool: BlockPool, blocks: Int32Array) -> Int32Array:
        counts = self._hits[pool.name][blocks]
        return np.where(counts[:, 1] == pool.arrays.records[blocks, LIFE], counts[:, 0], 0).astype(np.int32)

    def _state_of(self, pool: BlockPool, block: int) -> BlockState:
        record = pool.arrays.records[block]
        if record[REF_COUNT]:
            return BlockState.LIVE
        if record[QUEUE] == DEFERRED:
            return BlockState.DEFERRED
        if record[QUEUE] == ABSENT:
            return BlockState.ABSENT
        if not record[NAME]:
            return BlockState.FREE
        return BlockState.CACHED if _lease_end_s(pool, block) is None else BlockState.LEASED

    def _tenant_of(self, pool: BlockPool, block: int) -> str | None:
        tenants = pool.arrays.tenants
        if not len(tenants) or self._state_of(pool, block) in {BlockState.FREE, BlockState.ABSENT}:
            return None
        return self._state.room.names[int(tenants[block, CHARGED])]

    def _rows_of(self, pool: BlockPool, block: int) -> tuple[int, ...]:
        """List the running rows with a block in their tables."""
        state = self._state
        rows = np.flatnonzero(state.rows[:, STATUS] == RUNNING)
        found: set[int] = set()
        for group in state.all_groups:
            if group.pool is pool and len(rows):
                num_blocks = state.rows[rows, group.arrays.parameters[AT] + NUM_BLOCKS]
                entries = group.arrays.table[rows, : int(num_blocks.max())]
                has_block = (entries == block) & (np.arange(entries.shape[1]) < num_blocks[:, None])
                found |= set(rows[has_block.any(axis=1)].tolist())
        return tuple(sorted(found))


def _lease_end_s(pool: BlockPool, block: int) -> float | None:
    leases = pool.arrays.leases
    if not len(leases) or leases[block] <= 0:
        return None
    return inf if leases[block] == HIGH_PRIORITY else float(leases[block])
