"""The blocks of one pool: who holds each, when it goes back, and what is evicted to make room.

``BlockPool`` owns the arrays of :mod:`~pagedkv.pool.blocks` and, with this module's compiled functions,
reference counts, deferred frees and eviction. It does not know sequences or tables.

A block's journey::

            acquire                     release, count 0, no step needs it: cached -> back, else -> front
    FREE ------------> IN USE --------------------------------------------------------> FREE
      ^                 |   ^
      |                 |   | reuse (a prefix hit)
      |   settle        v   |
      +-------------- DEFERRED   release, count 0, a step in flight or a planned copy may still use it

Steps are numbered. ``OPEN_STEP`` is being put together, every step up to ``SETTLED_STEP`` is over, those
between are in flight. Who gives a reference back says which step may be the last to touch the block for its sake,
and the block's hold is raised to that, also while references remain: with the last one gone, it waits for the
latest of all these steps. Every step has a list of the blocks that wait for it, so that settling costs what it frees.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.arguments import LARGEST_SIZE
from pagedkv.arrays import Int32Array
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.errors import BlockError, ConfigurationError
from pagedkv.events import CLEARED, GAP, CacheEvents
from pagedkv.pool import bounding, free_queue
from pagedkv.pool.blocks import (
    CLOCK_US,
    DEFERRED,
    EVENT_FIELDS,
    EXTRA,
    FREE,
    HAS_CLOCK,
    HOLD_STEP,
    IN_ORDER,
    IN_SETS,
    IN_USE,
    LIFE,
    NAME,
    NEW,
    NEWEST,
    NEXT,
    NULL_BLOCK,
    NUM_ACQUIRED,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_DEFERRED_LISTS,
    NUM_EVENTS,
    NUM_FREE,
    NUM_HIT_BLOCKS,
    NUM_LEASED,
    NUM_SENTINELS,
    OLDEST,
    OPEN_STEP,
    PENDING_STEP,
    PLAIN,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    UNDATED,
    PoolArrays,
    PoolFeatures,
    new_pool_arrays,
)
from pagedkv.pool.capping import lose_content, make_room
from pagedkv.pool.charging import (
    ANY,
    IN_CACHED,
    NOBODY,
    PAYER,
    accounts_of,
    join,
    leave,
    new_accounts,
    num_permitted,
    rest,
    resume,
    take,
    uncharge,
)
from pagedkv.pool.eviction import hooks
from pagedkv.pool.eviction.policy import EvictionPolicy
from pagedkv.pool.eviction.registry import DEFAULT, require_listed
from pagedkv.pool.ghosts import CALLED_OFF, EVICTED, OVERWRITTEN, RESET, SHED, new_ghosts
from pagedkv.pool.leasing import enqueue_leased, give_largest_up, is_due, is_leased, unlink_leased
from pagedkv.pool.prefix_index import PrefixIndex, forget, unname
from pagedkv.pool.sparing import enqueue_spare, is_spare, renew

__all__ = [
    "BlockPool",
    "KVCacheBlock",
    "acquire",
    "acquire_all",
    "acquire_often",
    "adopt",
    "claim",
    "drop_name",
    "lower_hold",
    "release",
    "reuse",
    "settle",
]

MICROSECONDS: Final = 1_000_000  # a second


@inlined
def acquire(pool: PoolArrays) -> int:
    """Hand out the next free block, evicting what it cached; the caller has checked that there is one."""
    block = unsigned(pool.records[NULL_BLOCK, NEXT])
    if _is_plain(pool, block):
        free_queue.remove(pool.records, pool.counts, block)
    else:
        block = unsigned(_vacate(pool))
    _begin(pool, block)
    pool.counts[NUM_ACQUIRED] += 1
    return block


@inlined
def acquire_often(pool: PoolArrays) -> int:
    """Do what :func:`acquire` does, for loops that take block after block: no call hands over the pool."""
    block = _make_vacant(pool)
    _begin(pool, block)
    pool.counts[NUM_ACQUIRED] += 1
    return block


@compiled
def acquire_all(pool: PoolArrays, blocks: Int32Array) -> None:
    """Hand out as many free blocks as fit into ``blocks``; the caller has checked that there are so many.

    Those without content go from the front of the list in one piece: 3 ns each, where one by one takes 8.
    """
    for index in range(_take_plain(pool, blocks), len(blocks)):
        block = unsigned(_make_vacant(pool))
        _begin(pool, block)
        pool.counts[NUM_ACQUIRED] += 1
        blocks[index] = block


@inlined
def _take_plain(pool: PoolArrays, blocks: Int32Array) -> int:
    """Hand out what is at the front and has no content, as far as it fits; return how many there were."""
    num_taken = 0
    block = unsigned(pool.records[NULL_BLOCK, NEXT])
    while num_taken < len(blocks) and _is_plain(pool, block):
        following = unsigned(pool.records[block, NEXT])
        _begin(pool, block)
        blocks[num_taken] = block
        num_taken += 1
        block = following
    free_queue.begin_with(pool.records, pool.counts, block, num_taken)
    pool.counts[NUM_ACQUIRED] += num_taken
    return num_taken


@inlined
def _is_plain(pool: PoolArrays, first: int) -> bool:
    """Tell whether the first of the cold list has no content, so that nothing goes for it; and nobody is charged."""
    return bool(first != NULL_BLOCK and not pool.records[first, NAME] and len(pool.tenants) == 0)


@inlined
def _make_vacant(pool: PoolArrays) -> int:
    """Take the next free block out and make it forget what it cached."""
    if len(pool.tenants):
        make_room(pool)
    if pool.counts[NUM_LEASED] and pool.counts[NUM_LEASED] == pool.counts[NUM_FREE]:
        give_largest_up(pool, ANY)
    records = pool.records
    block = free_queue.first(records)
    if records[block, NAME] and not is_spare(pool, block):
        block = unsigned(hooks.choose_victim(pool, block))
    free_queue.remove(records, pool.counts, block)
    if records[block, NAME]:
        lose_content(pool, block)
    if len(pool.tenants):
        take(pool, block)
    return block


@compiled
def _vacate(pool: PoolArrays) -> int:
    """Do that in a call of its own: so little of it stands in loops that take a block now and then."""
    return int(_make_vacant(pool))


@inlined
def _begin(pool: PoolArrays, block: int) -> None:
    """Let a block begin another life, with a first reference."""
    records = pool.records
    records[block, REF_COUNT] = 1
    records[block, LIFE] += 1
    records[block, HOLD_STEP] = 0
    records[block, PENDING_STEP] = 0
    records[block, EXTRA] = 0
    records[block, QUEUE] = NEW
    if len(pool.epochs):
        pool.epochs[block, NEWEST] = pool.epochs[block, OLDEST] = UNDATED


@inlined
def claim(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a block that has content, wherever it is."""
    records = pool.records
    if is_spare(pool, block):
        renew(pool, block)
    if records[block, QUEUE] == FREE:
        if is_leased(pool, block):
            unlink_leased(pool, block)
            hooks.note_name(pool, block)
        else:
            free_queue.remove(pool.records, pool.counts, block)
        pool.counts[NUM_CACHED] -= 1
        if len(pool.bounds):
            bounding.leave(pool, block)
        if len(pool.tenants):
            resume(pool, block)
        hooks.note_claim(pool, block)
    elif records[block, QUEUE] == DEFERRED:
        free_queue.unlink(pool.records, block)
        records[block, QUEUE] = IN_USE
        pool.counts[NUM_DEFERRED] -= 1
    records[block, REF_COUNT] += 1


@inlined
def reuse(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a named block, for a sequence that hits it."""
    claim(pool, block)
    hooks.note_reuse(pool, block)


@inlined
def adopt(pool: PoolArrays, block: int) -> None:
    """Take one more reference to a named block, for a sequence that has computed its content once more."""
    claim(pool, block)
    hooks.note_recomputed(pool, block)


@compiled
def reuse_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Take one more reference to each block of a prefix hit (null blocks are passed over)."""
    for block in block_ids:
        if block != NULL_BLOCK:
            reuse(pool, block)
            pool.counts[NUM_HIT_BLOCKS] += 1


@inlined
def release(pool: PoolArrays, block: int, last_step: int) -> None:
    """Give one reference back; the last one sends the block to the free queue or defers it.

    ``last_step`` is the last planned step that may touch the block for the sake of whoever gives it back.
    """
    records = pool.records
    records[block, REF_COUNT] -= 1
    counts = pool.counts
    if not counts[IN_ORDER]:
        records[block, HOLD_STEP] = max(records[block, HOLD_STEP], last_step)
    if records[block, REF_COUNT] > 0:
        return
    if records[block, NAME] and records[block, PENDING_STEP] == counts[OPEN_STEP]:
        forget(pool, block, CALLED_OFF)  # nobody is left to compute what was promised for the open step
    if records[block, HOLD_STEP] > counts[SETTLED_STEP]:
        sentinel = free_queue.deferred_sentinel(pool.records, records[block, HOLD_STEP])
        free_queue.link_before(pool.records, sentinel, block)
        records[block, QUEUE] = DEFERRED
        counts[NUM_DEFERRED] += 1
    else:
        _enqueue(pool, block)


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced block where its content says: the front if it has none, else among its like."""
    if len(pool.tenants):
        rest(pool, block)
    if pool.records[block, NAME]:
        if is_leased(pool, block) and is_due(pool, block):
            pool.leases[block] = 0
        if is_leased(pool, block):
            enqueue_leased(pool, block)
        elif is_spare(pool, block):
            enqueue_spare(pool, block)
        else:
            hooks.enqueue(pool, block)
            if len(pool.tenants):
                join(pool, block, IN_CACHED)
        pool.counts[NUM_CACHED] += 1
        if len(pool.bounds):
            _keep_bound(pool, block)
    else:
        free_queue.prepend(pool.records, pool.counts, block)


@compiled
def _keep_bound(pool: PoolArrays, block: int) -> None:
    """A block has become cached: if its group has too many now, the least valuable loses its name."""
    if bounding.stand(pool, block):
        least = bounding.least_valuable(pool, block)
        drop_name(pool, least, SHED if is_spare(pool, least) else EVICTED)


@compiled
def settle(pool: PoolArrays, step: int) -> None:
    """Note that every step up to ``step`` is over, and free what waited for them."""
    settled = pool.counts[SETTLED_STEP]
    pool.counts[SETTLED_STEP] = step
    if pool.counts[NUM_DEFERRED]:
        for over in range(settled + 1, min(step, settled + NUM_DEFERRED_LISTS) + 1):
            _free_deferred(pool, free_queue.deferred_sentinel(pool.records, over), step)


@compiled
def _free_deferred(pool: PoolArrays, sentinel: int, step: int) -> None:
    """Free the blocks of one list that wait for no later step than ``step``, in the order of their release."""
    records = pool.records
    block = records[sentinel, NEXT]
    while block != sentinel:
        following = records[block, NEXT]
        if records[block, HOLD_STEP] <= step:
            free_queue.unlink(records, block)
            pool.counts[NUM_DEFERRED] -= 1
            _enqueue(pool, block)
        block = following


@compiled
def drop_name(pool: PoolArrays, block: int, cause: int = OVERWRITTEN) -> None:
    """Make a named block's content unfindable; if it is free, it has no content any more.

    ``cause``: why, for whoever asks later (:mod:`pagedkv.pool.ghosts`).
    """
    _lose_name(pool, block, cause)


@inlined
def _lose_name(pool: PoolArrays, block: int, cause: int) -> None:
    """Do what :func:`drop_name` does, compiled into the caller."""
    is_free = pool.records[block, QUEUE] == FREE
    if is_free and len(pool.bounds):
        bounding.leave(pool, block)
    if is_free and is_leased(pool, block):
        unlink_leased(pool, block)
    else:
        if not (is_free and is_spare(pool, block)):
            hooks.note_drop(pool, block)  # else it is none of the eviction policy's
        if is_free:
            free_queue.remove(pool.records, pool.counts, block)
    unname(pool, block, cause)
    if is_free:
        if len(pool.tenants):
            leave(pool, block)
            uncharge(pool, block)
        free_queue.prepend(pool.records, pool.counts, block)
        pool.counts[NUM_CACHED] -= 1


@compiled
def drop_all_names(pool: PoolArrays, cause: int = RESET) -> int:
    """Make everything unfindable; return how many blocks had a name."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME]:
            _lose_name(pool, block, cause)
            num_dropped += 1
    return num_dropped


@compiled
def withdraw_since(pool: PoolArrays, step: int) -> int:
    """Drop the names whose content steps from ``step`` on were to compute; return how many."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.records[block, PENDING_STEP] >= step:
            drop_name(pool, block, CALLED_OFF)
            num_dropped += 1
    return num_dropped


@compiled
def lower_hold(pool: PoolArrays, block: int, step: int) -> None:
    """Note that ``step`` is the last that a block waits for, which waited for a later one."""
    records, counts = pool.records, pool.counts
    records[block, HOLD_STEP] = step
    if records[block, QUEUE] != DEFERRED:
        return
    free_queue.unlink(records, block)
    if step > counts[SETTLED_STEP]:
        free_queue.link_before(records, free_queue.deferred_sentinel(records, step), block)
    else:
        counts[NUM_DEFERRED] -= 1
        _enqueue(pool, block)


@dataclass(frozen=True, slots=True)
class KVCacheBlock:
    """One block as it is now (a copy of its record; later changes do not show).

    Args:
        block_id: its id.
        ref_count: table entries that point to it, and tickets that hold it.
        group: index of the group under whose name it can be found, or None.
        digest: SHA-256 of its chain while it can be found, else None.
        is_computed: no step in flight or open still writes it.
        place: "in use", "free" or "deferred".
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
        block_size: most tokens that one of its blocks stands for.
        caching: keep tokens and digests, so that blocks can be named.
        policy: the order in which cached blocks are evicted; without caching there are none.
        in_order: blocks that are given back wait for moves only (:class:`~pagedkv.SpaceConfig`).
        features: what it keeps only where that is asked for.
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
        """Build an empty pool. O(num_blocks). Raises ConfigurationError for impossible sizes and foreign policies."""
        if num_blocks < 2 or block_size < 1:  # noqa: PLR2004 - the null block and one more
            raise ConfigurationError(
                f"pool {name!r} needs at least 2 blocks of at least 1 token, got {num_blocks} of {block_size}"
            )
        self.name = name
        self.num_blocks = num_blocks
        self.policy = policy if caching else DEFAULT
        require_listed(self.policy)
        state = self.policy.new_state(self.num_usable)
        arrays = new_pool_arrays(num_blocks, block_size, caching=caching, features=features)
        arrays.counts[IN_ORDER] = in_order
        arrays.counts[IN_SETS] = features.num_in_sets
        self.arrays = self.policy.arrays._make(arrays)._replace(
            eviction=state.counts,
            eviction_table=state.table,
            ranks=state.ranks,
            eviction_blocks=state.blocks,
            eviction_runs=state.runs,
            eviction_rates=state.rates,
            ghosts=new_ghosts(features.ghosts if caching else 0),
            bounds=bounding.new_bounds(num_blocks, dict(features.bounds)),
            tenants=new_accounts(num_blocks, features.limits),
        )
        self.free_queue = free_queue.FreeBlockQueue(self.arrays)
        self.prefix_index = PrefixIndex(self.arrays)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included. O(1)."""
        return int(self.arrays.counts[NUM_FREE])

    @property
    def accounts(self) -> Int32Array:
        """View what each tenant has (:mod:`pagedkv.pool.charging`): int32 ``[tenants, 4]``. O(1)."""
        return accounts_of(self.arrays.tenants, self.num_blocks)

    def num_permitted(self, tenant: int) -> int:
        """Count the blocks that a tenant may take now, within its cap and beside what floors promise others. O(1).

        All that are free, if there are no tenants.
        """
        tenants = self.arrays.tenants
        return num_permitted(tenants, self.num_blocks, tenant, self.num_free) if len(tenants) else self.num_free

    def let_pay(self, tenant: int) -> None:
        """Charge what is taken from now on to a tenant. Nothing if there are none."""
        self.arrays.tenants[:1, PAYER] = tenant

    @property
    def num_cached(self) -> int:
        """Free blocks that can be found. O(1)."""
        return int(self.arrays.counts[NUM_CACHED])

    @property
    def has_events(self) -> bool:
        """Whether events wait to be drained. O(1)."""
        return bool(self.arrays.counts[NUM_EVENTS])

    @property
    def num_deferred(self) -> int:
        """Unreferenced blocks that wait for a step. O(1)."""
        return int(self.arrays.counts[NUM_DEFERRED])

    @property
    def num_usable(self) -> int:
        """Blocks of an empty pool: all but the null block."""
        return self.num_blocks - 1

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the bookkeeping of all blocks takes."""
        return sum(array.nbytes for array in self.arrays)

    def block(self, block_id: int) -> KVCacheBlock:
        """Look at one block. Raises BlockError for a foreign id. O(1)."""
        self._require_own(block_id)
        record = self.arrays.records[block_id]
        named = bool(record[NAME])
        return KVCacheBlock(
            block_id=block_id,
            ref_count=int(record[REF_COUNT]),
            group=int(record[NAME]) - 1 if named else None,
            digest=self.arrays.digests[block_id].astype(">u4").tobytes() if named else None,
            is_computed=bool(record[PENDING_STEP] <= self.arrays.counts[SETTLED_STEP]),
            place={NEW: "in use", IN_USE: "in use", FREE: "free", DEFERRED: "deferred"}[int(record[QUEUE])],
        )

    def acquire(self, n: int) -> list[int] | None:
        """Take ``n`` blocks, evicting as needed, or None and nothing changed. Raises BlockError if n < 0. O(n).

        They are charged to nobody; the floors of tenants stay free.
        """
        if n < 0:
            raise BlockError(f"cannot take {n} blocks from pool {self.name!r}")
        if n > self.num_permitted(NOBODY):
            return None
        self.let_pay(NOBODY)
        return [acquire(self.arrays) for _ in range(n)]

    def release(self, block_ids: list[int]) -> None:
        """Give one reference to each block back.

        Raises:
            BlockError: a block is foreign or has fewer references; nothing was changed.
        """
        for block_id, given_back in Counter(block_ids).items():
            self._require_own(block_id)
            held = int(self.arrays.records[block_id, REF_COUNT])
            if given_back > held:
                message = f"block {block_id} of pool {self.name!r} has {held} references, {given_back} were released"
                raise BlockError(message)
        last_planned = int(self.arrays.counts[OPEN_STEP]) - 1  # nobody says which step may still touch them
        for block_id in block_ids:
            release(self.arrays, block_id, last_planned)

    def advance(self, now_s: float) -> None:
        """Set the clock that eviction policies look at, in seconds; the caller has checked that it never goes back."""
        self.arrays.counts[CLOCK_US] = round(now_s * MICROSECONDS)
        self.arrays.counts[HAS_CLOCK] = 1

    def record_events(self, most: int) -> None:
        """Record events from now on, the latest ``most`` of them."""
        if len(self.arrays.event_log) == 0:
            self.arrays = self.arrays._replace(event_log=np.zeros((most, EVENT_FIELDS), np.uint32))

    def clear_names(self, cause: int = RESET) -> None:
        """Make everything unfindable, and record that as one event; ``cause``: why. O(blocks)."""
        log = self.arrays.event_log
        drop_all_names(self.arrays._replace(event_log=log[:0]), cause)
        if len(log):
            event = int(self.arrays.counts[NUM_EVENTS]) % len(log)
            log[event] = 0
            log[event, 0] = CLEARED
            self.arrays.counts[NUM_EVENTS] += 1

    def drain_events(self) -> CacheEvents:
        """Take the events recorded since the last call, those that the log had room for. O(events)."""
        num_events, capacity = int(self.arrays.counts[NUM_EVENTS]), len(self.arrays.event_log)
        num_lost = max(0, num_events - capacity)
        log = self.arrays.event_log[np.arange(num_lost, num_events) % max(1, capacity)]
        self.arrays.counts[NUM_EVENTS] = 0
        if num_lost:
            gap = np.zeros((1, EVENT_FIELDS), np.uint32)
            gap[0, [0, 2]] = GAP, min(num_lost, LARGEST_SIZE)
            log = np.concatenate([gap, log])
        words = log[:, 3:].astype(">u4").view(np.uint8).reshape(len(log), 2, 32)
        return CacheEvents(
            pool=self.name,
            kinds=log[:, 0].astype(np.int32),
            groups=log[:, 1].astype(np.int32) - 1,
            block_ids=log[:, 2].astype(np.int32),
            digests=words[:, 0].copy(),
            parent_digests=words[:, 1].copy(),
        )

    def _require_own(self, block_id: int) -> None:
        if not 0 < block_id < self.num_blocks:
            message = f"block {block_id} is not one of the blocks 1..{self.num_blocks - 1} of pool {self.name!r}"
            raise BlockError(message)
