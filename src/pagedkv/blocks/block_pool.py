"""The blocks of one pool, as an object: its arrays, with queries and changes for users, tests and other rooms.

``BlockPool`` creates the arrays of :mod:`~pagedkv.blocks.record` and stores their sizes. The transitions of a
block are those of :mod:`~pagedkv.blocks.life_cycle`, which compiled loops call on the same arrays.

The code that a pool runs. The class of its arrays selects it when a loop is compiled.

Every loop that takes a pool is compiled once for each class. To keep these few, there is one class without features,
for LRU, and for each policy one with all features. All pools of a space have one class, since loops take pools of both
sides.
"""

from collections import Counter
from dataclasses import dataclass

from pagedkv.blocks import cached_bounds, event_log, free_queue
from pagedkv.blocks.event_log import new_log
from pagedkv.blocks.eviction.policy import LRU, EvictionPolicy
from pagedkv.blocks.eviction.registry import DEFAULT, require_listed
from pagedkv.blocks.ghosts import new_ghosts
from pagedkv.blocks.life_cycle import acquire, release
from pagedkv.blocks.prefix_index import PrefixIndex
from pagedkv.blocks.record import (
    ABSENT,
    DEFERRED,
    FREE,
    IN_ORDER,
    IN_SETS,
    IN_USE,
    NAME,
    NEW,
    NO_TENANT,
    NUM_ABSENT,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_EVENTS,
    NUM_FREE,
    OPEN_STEP,
    PENDING_STEP,
    PLAIN,
    QUEUE,
    REF_COUNT,
    RESET,
    SETTLED_STEP,
    PoolArrays,
    PoolFeatures,
    advance_clock,
    new_pool_arrays,
)
from pagedkv.blocks.sweeps import drop_all_names
from pagedkv.blocks.tenant_charges import accounts_of, new_accounts, num_permitted, set_current_tenant
from pagedkv.contract.answers import CacheEvents
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import BlockError, ConfigurationError


@dataclass(frozen=True, slots=True)
class KVCacheBlock:
    """A copy of one block's record; later changes do not show.

    Args:
        block_id: its id.
        ref_count: table entries and tickets that refer to it.
        group: index of the group of its name, or None without a name.
        digest: SHA-256 of its chain, or None without a name.
        is_computed: no step that is open or in flight still computes it. Moves that write it are not counted here.
        place: "in use", "free", "deferred" or "absent".
    """

    block_id: int
    ref_count: int
    group: int | None
    digest: bytes | None
    is_computed: bool
    place: str


class BlockPool:
    """A pool of blocks of equal size, with reference counts, prefix index and eviction.

    Args:
        name: for messages.
        num_blocks: blocks, the null block included.
        block_size: most tokens of one block.
        caching: store tokens and digests, so that blocks can be named.
        policy: the order in which cached blocks are evicted; not used without caching.
        in_order: released blocks wait for moves only (:class:`~pagedkv.SpaceConfig`).
        features: the optional records of the pool.
    """

    def __init__(
        self,
        name: str,
        num_blocks: int,
        block_size: int = 16,
        *,
        caching: bool = True,
        policy: EvictionPolicy = DEFAULT,
        in_order: bool = False,
        features: PoolFeatures = PLAIN,
    ) -> None:
        """Build an empty pool. O(num_blocks). Raises ConfigurationError for impossible sizes and unlisted policies."""
        if num_blocks < 2 or block_size < 1:  # noqa: PLR2004 - the null block and one more
            raise ConfigurationError(
                f"pool {name!r} needs at least 2 blocks of at least 1 token, got {num_blocks} of {block_size}"
            )
        self.name = name
        self.num_blocks = num_blocks
        self.policy = policy if caching else DEFAULT
        require_listed(self.policy)
        self.arrays = new_arrays(self.policy, num_blocks, block_size, caching=caching, features=features)
        self.arrays.counts[IN_ORDER] = in_order
        self.arrays.counts[IN_SETS] = features.num_in_sets
        self.free_queue = free_queue.FreeBlockQueue(self.arrays)
        self.prefix_index = PrefixIndex(self.arrays)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included. O(1)."""
        return int(self.arrays.counts[NUM_FREE])

    @property
    def accounts(self) -> Int32Array:
        """View each tenant's counts (:mod:`pagedkv.blocks.tenant_charges`): int32 ``[tenants, 4]``. O(1)."""
        return accounts_of(self.arrays.tenants, self.num_blocks)

    def num_permitted(self, tenant: int) -> int:
        """Count the free blocks that a tenant may allocate now, given its cap and the floors of other tenants. O(1).

        Without tenants these are all free blocks.
        """
        tenants = self.arrays.tenants
        return num_permitted(tenants, self.num_blocks, tenant, self.num_free) if len(tenants) else self.num_free

    def charge_to(self, tenant: int) -> None:
        """Charge all later allocations to a tenant. No effect without tenants."""
        set_current_tenant(self.arrays.tenants, tenant)

    @property
    def num_cached(self) -> int:
        """Free blocks that have a name. O(1)."""
        return int(self.arrays.counts[NUM_CACHED])

    @property
    def has_events(self) -> bool:
        """Whether events wait to be drained. O(1)."""
        return bool(self.arrays.counts[NUM_EVENTS])

    @property
    def num_deferred(self) -> int:
        """Unreferenced blocks that wait until a step is over. O(1)."""
        return int(self.arrays.counts[NUM_DEFERRED])

    @property
    def num_usable(self) -> int:
        """Blocks of an empty pool: all but the null block, absent ones included."""
        return self.num_blocks - 1

    @property
    def num_absent(self) -> int:
        """Blocks whose memory was given back. O(1)."""
        return int(self.arrays.counts[NUM_ABSENT])

    @property
    def num_present(self) -> int:
        """Blocks that there are now: all but the null block and absent ones. O(1)."""
        return self.num_usable - self.num_absent

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for the records of all blocks."""
        return sum(array.nbytes for array in self.arrays)

    def block(self, block_id: int) -> KVCacheBlock:
        """Return a copy of one block's record. Raises BlockError for an id outside the pool. O(1)."""
        self._require_own(block_id)
        record = self.arrays.records[block_id]
        named = bool(record[NAME])
        return KVCacheBlock(
            block_id=block_id,
            ref_count=int(record[REF_COUNT]),
            group=int(record[NAME]) - 1 if named else None,
            digest=self.arrays.digests[block_id].astype(">u4").tobytes() if named else None,
            is_computed=bool(record[PENDING_STEP] <= self.arrays.counts[SETTLED_STEP]),
            place={NEW: "in use", IN_USE: "in use", FREE: "free", DEFERRED: "deferred", ABSENT: "absent"}[
                int(record[QUEUE])
            ],
        )

    def acquire(self, n: int) -> list[int] | None:
        """Allocate ``n`` blocks, evicting as needed; None, with nothing changed, if too few are free. O(n).

        They are charged to no tenant; the floors of tenants are respected. Raises BlockError if n < 0.
        """
        if n < 0:
            raise BlockError(f"cannot take {n} blocks from pool {self.name!r}")
        if n > self.num_permitted(NO_TENANT):
            return None
        self.charge_to(NO_TENANT)
        return [acquire(self.arrays) for _ in range(n)]

    def release(self, block_ids: list[int]) -> None:
        """Release one reference to each block; a block that is listed twice loses two.

        Raises:
            BlockError: a block is outside the pool or has fewer references; nothing was changed.
        """
        for block_id, given_back in Counter(block_ids).items():
            self._require_own(block_id)
            held = int(self.arrays.records[block_id, REF_COUNT])
            if given_back > held:
                message = f"block {block_id} of pool {self.name!r} has {held} references, {given_back} were released"
                raise BlockError(message)
        last_planned = int(self.arrays.counts[OPEN_STEP]) - 1  # the last step that may still use them is not known
        for block_id in block_ids:
            release(self.arrays, block_id, last_planned)

    def advance(self, now_s: float) -> None:
        """Set the clock of the eviction policies, in seconds; the caller has checked that it never decreases."""
        advance_clock(self.arrays.counts, now_s)

    def clear_names(self, cause: int = RESET) -> None:
        """Remove all names, for ``cause``, and log that as one event. O(blocks)."""
        drop_all_names(self.arrays._replace(event_log=self.arrays.event_log[:0]), cause)
        event_log.log_cleared(self.arrays)

    def drain_events(self) -> CacheEvents:
        """Take the events since the last call; if the log was full, the oldest are missing. O(events)."""
        return event_log.drain(self.name, self.arrays)

    def _require_own(self, block_id: int) -> None:
        if not 0 < block_id < self.num_blocks:
            message = f"block {block_id} is not one of the blocks 1..{self.num_blocks - 1} of pool {self.name!r}"
            raise BlockError(message)


def new_arrays(
    policy: EvictionPolicy, num_blocks: int, block_size: int, *, caching: bool, features: PoolFeatures
) -> PoolArrays:
    """Make the arrays of an empty pool, of the class that selects its code. O(blocks)."""
    state = policy.new_state(num_blocks - 1)
    arrays = new_pool_arrays(num_blocks, block_size, caching=caching, features=features)
    has_features = features._replace(num_in_sets=0) != PLAIN or policy is not LRU
    kind = policy.arrays if has_features else PoolArrays
    return kind._make(arrays)._replace(
        event_log=new_log(features.events),
        eviction=state.counts,
        eviction_table=state.table,
        ranks=state.ranks,
        eviction_blocks=state.blocks,
        eviction_runs=state.runs,
        eviction_rates=state.rates,
        ghosts=new_ghosts(features.ghosts if caching else 0),
        bounds=cached_bounds.new_bounds(num_blocks, dict(features.bounds)),
        tenants=new_accounts(num_blocks, features.limits),
    )
