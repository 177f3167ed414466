"""The record of each block of one pool: flat arrays, with a row of small integers a block.

A record is 14 adjacent int32, since every operation on a block reads several of them (reference count, links, name),
and one cache line then serves them all; see docs/decisions/0002-block-records.md. Zero means "nothing" in every
column, so that a million blocks cost one ``np.zeros``. Block 0 is the null block. It is never linked, named or
allocated, so its id can stand for "none" and its record is the free queue's sentinel.

Bytes a block, at 16 tokens::

    record 14 x 4 = 56 | tokens 16 x 4 = 64 | digest 32 | index bucket 3..6      = 155..158

To this come the arrays of the eviction policy (nothing for LRU, 1 byte for T-LRU, 8 for FIFO, 9 for the policy by
priority, 33 to 65 for the adaptive policy, 218 to 250 for the learning policy) and those of :class:`PoolFeatures`.

Columns are written where the reason stands: in the life cycle of a block (:mod:`~pagedkv.blocks.life_cycle`), by the
modules that order free blocks, and by operations on rows. ``check()`` proves what must hold between them
(:mod:`~pagedkv.blocks.auditing`). ``QUEUE`` is the place of a block::

    NEW --content is on its way--> IN_USE ----------> FREE             places; a block that is FREE and named is cached
     ^                               ^  '--> DEFERRED --'
     '---------- a new life ---------+----------------'                a reference to a free block leads back

A block can also be ABSENT: its memory was given back (:func:`~pagedkv.blocks.life_cycle.take_away`). It then has no
content and is in no list, so no loop meets it. The arrays always have a record for every block that a pool can have.

A free or deferred block is in one circular list; the list's sentinel is a record of its own. A free leased block is
instead in one tree (:mod:`~pagedkv.blocks.treap`), which uses the same two columns for a node's two subtrees.
Blocks that are being moved from one to the other form a *chain*: each links to the next, and the last to the null
block. The lists and their meaning are defined in :mod:`~pagedkv.blocks.free_queue`.

One column has two meanings. In groups with chains that are walked it is ``AHEAD``, a block further down the chain for
prefetching; their blocks stay cached without a reason. In window groups, which are not walked, it is ``KEPT``, the
reasons for which a block is kept, as bits (:mod:`pagedkv.space.windows`). ``SPARE`` marks a spare block in both.

Blocks store steps in 32 bits, so all numbers are lowered from time to time. The caller's clock is kept for policies.
Whenever the pool removes a name it passes a cause, which ghosts store (:mod:`~pagedkv.blocks.ghosts`).
"""

from typing import Final, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.compilation.compiled import inlined
from pagedkv.contract.arrays import (
    DIGEST_WORDS,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    Uint8Array,
    Uint32Array,
)

P = ParamSpec("P")
R = TypeVar("R")

NULL_BLOCK: Final = 0
CACHE_LINE_NBYTES: Final = 64
# Columns of a record. Those that a decode step reads are adjacent, and so are those read while a prompt's chain is
# walked, so that they share a cache line in most records.
BUCKET_NEXT: Final = 0  # next named block in the same bucket
HOLD_STEP: Final = 1  # last step that has it in its plan, or that may still read or write it
RELEASED: Final = HOLD_STEP  # for a free leased block, which no step holds: the number of its release
NEXT: Final = 2  # neighbours in the free queue or in a deferred list; 0 is the free queue's sentinel
PREVIOUS: Final = 3
REF_COUNT: Final = 4  # table entries and tickets that refer to it
QUEUE: Final = 5  # its place: NEW or IN_USE, FREE, DEFERRED or ABSENT; the first column that a walk reads
PENDING_STEP: Final = 6  # last step that writes tokens here; computed once that step is settled
NAME: Final = 7  # 0: no name; otherwise 1 + index of the group
LIFE: Final = 8  # incremented whenever the content is lost, so that old links to it become invalid
PARENT: Final = 9  # the named block before it, and the parent's life at that time
PARENT_LIFE: Final = 10
EXTRA: Final = 11  # id of its extra keys (0: none)
SUCCESSOR: Final = 12  # its most recently named child
AHEAD: Final = 13  # a hint for prefetching: a block LOOKAHEAD places further down its chain, or 0; may be wrong
KEPT: Final = AHEAD  # in a window group, which is not walked: why it stays cached while unreferenced, or SPARE
NUM_FIELDS: Final = 14
FIRST_WALK_FIELD: Final = QUEUE
LAST_WALK_FIELD: Final = AHEAD
LOOKAHEAD: Final = (
    16  # a walk over 8,192 shuffled blocks, caches cold: 1,300 us without, 246 for 8, 169 for 16, 164 for 24
)
# Values of QUEUE. A block in a place up to IN_USE has references.
NEW: Final = -1  # in use, allocated since the last plan; it has no content yet, and no move brings any
IN_USE: Final = 0
FREE: Final = 1
DEFERRED: Final = 2
ABSENT: Final = 3
SPARE: Final = -1  # value of KEPT: evicted before other cached blocks (life_cycle.py)
# Indices of ``counts``.
NUM_FREE: Final = 0
NUM_DEFERRED: Final = 1
NUM_NAMED: Final = 2
NUM_CACHED: Final = 3  # free blocks with a name
NUM_EVICTED: Final = 4  # cumulative, like all below
NUM_HIT_BLOCKS: Final = 5
NUM_ACQUIRED: Final = 6
NUM_EVENTS: Final = 7  # events since the log was drained, lost ones included
OPEN_STEP: Final = 8  # number of the step that is being put together
SETTLED_STEP: Final = 9  # every step up to this one is acknowledged or aborted
IN_ORDER: Final = 10  # 1 if blocks wait for moves only, since steps run in order; never changes
CLOCK_US: Final = 11  # the caller's clock as last set, in microseconds
HAS_CLOCK: Final = 12  # 1 once the clock was set
NUM_LEASED: Final = 13  # free blocks with a lease
NUM_RELEASED: Final = 14  # releases of leased blocks so far; RELEASED stores its values
IN_SETS: Final = 15  # groups of the pool with blocks that hit only together with those of other groups; never changes
NUM_ABSENT: Final = 16
NUM_COUNTS: Final = 17
NUM_DEFERRED_LISTS: Final = 16  # a power of two; step s has list s % 16
NUM_SENTINELS: Final = 3 + NUM_DEFERRED_LISTS  # records after those of the blocks
LEASED_ROOT: Final = 2  # the one among them that is no sentinel: the root of the tree of leases (blocks/treap.py)
# Columns of ``epochs`` (blocks/epochs.py).
OLDEST: Final = 0
NEWEST: Final = 1
UNDATED: Final = 2**31 - 1  # in both columns: no plan has computed content of the block yet
HIGH_PRIORITY: Final = float(np.finfo(np.float64).tiny)  # in ``leases``: kept before unleased blocks, without an end
TENANT_FIELDS: Final = 4  # columns of ``tenants`` (blocks/tenant_charges.py)
CHARGED: Final = 0  # the first of them: the tenant to which a block is charged
NO_TENANT: Final = 0  # that of sequences without a tenant, to which blocks without content are charged
EVENT_FIELDS: Final = 3 + 2 * DIGEST_WORDS  # kind, name, block, digest, parent's digest


class PoolArrays(NamedTuple):
    """The state of one pool, as arrays for compiled loops.

    Args:
        records: int32 ``[num_blocks + NUM_SENTINELS, NUM_FIELDS]``; after the blocks come the sentinels of the
            protected list and of the spare list, the root of the tree of leased blocks, and the sentinels of the lists
            of deferred blocks.
        tokens: int32 ``[num_blocks, block_size]``; ``[num_blocks, 0]`` without prefix caching.
        digests: uint32 ``[num_blocks, 8]``, big-endian words of the SHA-256; ``[0, 8]`` without caching.
        parent_digests: uint32 ``[num_blocks, 8]``, the digest of the block before each, the root's for a first one;
            ``[0, 8]`` if they are not kept.
        buckets: int32 ``[power of two]``, first block of each bucket of the prefix index; 3/4 to 3/2 a block.
        counts: int64 ``[NUM_COUNTS]``.
        event_log: uint32 ``[capacity, EVENT_FIELDS]``, a ring; capacity 0: no events are recorded.
        eviction: int64, counts of the eviction policy. The policy sets the sizes of this array and of the next five
            (:class:`~pagedkv.blocks.eviction.policy.PolicyState`); all are empty for LRU.
        eviction_table: uint32 ``[any, any]``, the policy's table.
        ranks: uint8, the policy's rank of each block.
        eviction_blocks: int32 ``[any, any]``, the policy's further records of blocks.
        eviction_runs: int32 ``[any, any]``, the policy's records of blocks that were released together.
        eviction_rates: float32 ``[any, any]``, the policy's learnt rates.
        ghosts: uint32 ``[sets, SET_WORDS]``, the records of lost content
            (:mod:`pagedkv.blocks.ghosts`); empty if there are none.
        epochs: int32 ``[num_blocks, 2]``, the oldest and the newest epoch of the weights that contributed to each block
            (:mod:`pagedkv.blocks.epochs`); ``[0, 2]`` where epochs are not counted.
        leases: float64 ``[num_blocks]``, the time until which each block is kept (:mod:`pagedkv.blocks.leasing`);
            ``[0]`` without leases.
        lease_links: int32 ``[num_blocks, 2]``, links between the free leased blocks that have the same parent
            (:mod:`pagedkv.blocks.leasing`); ``[0, 2]`` without leases.
        siblings: int32 ``[num_blocks, 2]``, links between the children of each block; ``[0, 2]`` if they are not kept.
        bounds: int32 ``[num_blocks + names, 4]``, the cached blocks of groups with a limit on their number
            (:mod:`pagedkv.blocks.cached_bounds`); ``[0, 4]`` if there are none.
        tenants: int32 ``[num_blocks + 4 * tenants, 4]``, the tenant to which each block is charged, and the counts of
            each tenant (:mod:`pagedkv.blocks.tenant_charges`); ``[0, 4]`` without tenants.
    """

    records: Int32Array
    tokens: Int32Array
    digests: Uint32Array
    parent_digests: Uint32Array
    buckets: Int32Array
    counts: Int64Array
    event_log: Uint32Array
    eviction: Int64Array
    eviction_table: Uint32Array
    ranks: Uint8Array
    eviction_blocks: Int32Array
    eviction_runs: Int32Array
    eviction_rates: Float32Array
    ghosts: Uint32Array
    epochs: Int32Array
    leases: Float64Array
    lease_links: Int32Array
    siblings: Int32Array
    bounds: Int32Array
    tenants: Int32Array


def aligned_zeros(num_rows: int, num_columns: int) -> Int32Array:
    """Make an int32 array of zeros; its rows begin at cache lines if a row is as long as a cache line."""
    spare = CACHE_LINE_NBYTES // 4
    flat = np.zeros(num_rows * num_columns + spare, np.int32)
    start = -flat.ctypes.data % CACHE_LINE_NBYTES // 4
    return flat[start : start + num_rows * num_columns].reshape(num_rows, num_columns)


class FeaturedArrays(PoolArrays):
    """The arrays of a pool that has features; as a subclass with an attribute ``policy``, of one that evicts by it."""

    __slots__ = ()
    has_features = True


class PoolFeatures(NamedTuple):
    """The optional records of a pool.

    Args:
        ghosts: least number of ghosts of lost content, 13 bytes each (:mod:`pagedkv.blocks.ghosts`).
        epochs: record the epochs of the weights that contributed to each block, 8 bytes a block
            (:mod:`pagedkv.blocks.epochs`).
        leases: content can be kept until a given time, 16 bytes a block (:mod:`pagedkv.blocks.leasing`).
        siblings: links between the blocks that have the same parent, 8 bytes a block
            (:mod:`pagedkv.blocks.siblings`).
        bounds: by name, most cached blocks, 16 bytes a block (:mod:`pagedkv.blocks.cached_bounds`).
        limits: cap and floor of each tenant, in blocks, the unnamed tenant first; 16 bytes a block and 64 a
            tenant (:mod:`pagedkv.blocks.tenant_charges`). Empty: blocks are not charged.
        events: most events of names that wait to be drained; older ones are lost
            (:mod:`pagedkv.blocks.event_log`). 0: none are recorded.
        parents: keep the digest of the block before each block, 32 bytes a block. Pools with events do so in any case;
            pools of the host must, so that blocks that are swapped in have it.
        num_in_sets: number of the pool's groups with prefix caching, if a hit needs blocks of several groups of the
            space; 0 if the blocks of this pool hit by themselves.
        others_have: another pool of the space has some feature, so this pool runs the code with features as well.
    """

    ghosts: int = 0
    epochs: bool = False
    leases: bool = False
    siblings: bool = False
    bounds: tuple[tuple[int, int], ...] = ()
    limits: tuple[tuple[int, int], ...] = ()
    events: int = 0
    parents: bool = False
    num_in_sets: int = 0
    others_have: bool = False

    @property
    def keeps_parents(self) -> bool:
        """Whether the digest of the block before each block is kept."""
        return self.parents or self.events > 0


PLAIN: Final = PoolFeatures()


# Steps


@inlined
def become_copy(source: Int32Array, block: int, destination: Int32Array, place: int, step: int) -> None:
    """Record that a plan copies a block to another, here or on the other side (host or device): both wait for it."""
    destination[place, PENDING_STEP] = source[block, PENDING_STEP]
    destination[place, QUEUE] = IN_USE
    source[block, HOLD_STEP] = step
    destination[place, HOLD_STEP] = step


def link_all(records: Int32Array) -> None:
    """Link every block into the null block's list, in order, and make the other sentinels' lists empty."""
    num_blocks = len(records) - NUM_SENTINELS
    records[:num_blocks, NEXT] = np.arange(1, num_blocks + 1)
    records[:num_blocks, PREVIOUS] = np.arange(-1, num_blocks - 1)
    records[NULL_BLOCK, PREVIOUS] = num_blocks - 1
    records[num_blocks - 1, NEXT] = NULL_BLOCK
    sentinels = np.arange(num_blocks, num_blocks + NUM_SENTINELS)
    records[sentinels, NEXT] = sentinels
    records[sentinels, PREVIOUS] = sentinels
    records[num_blocks + LEASED_ROOT, (NEXT, PREVIOUS)] = NULL_BLOCK


# Why a block is kept, as bits of KEPT; where states are bounded, a greater sum is worth more.
AT_INTERVAL: Final = 1
AT_END: Final = 2
AT_JUNCTION: Final = 4
AT_RESEND: Final = 8


def renumber(pool: PoolArrays, num_before: int, is_held: npt.NDArray[np.bool_]) -> None:
    """Lower all step numbers by ``num_before``. O(blocks).

    Args:
        is_held: bool ``[records]``, whether a record has a HOLD_STEP.
    """
    records = pool.records
    records[:, PENDING_STEP] = np.maximum(records[:, PENDING_STEP] - num_before, 0)
    records[is_held, HOLD_STEP] = np.maximum(records[is_held, HOLD_STEP] - num_before, 0)
    pool.counts[[OPEN_STEP, SETTLED_STEP]] -= num_before


MICROSECONDS: Final = 1_000_000  # a second


def advance_clock(counts: Int64Array, now_s: float) -> None:
    """Set the clock, in seconds; the caller has checked that it never decreases."""
    counts[CLOCK_US] = round(now_s * MICROSECONDS)
    counts[HAS_CLOCK] = 1


@inlined
def set_clock(counts: Int64Array, now_us: int) -> None:
    """Set the clock, in microseconds; the form of :func:`advance_clock` for compiled loops."""
    counts[CLOCK_US] = now_us
    counts[HAS_CLOCK] = 1


def new_pool_arrays(num_blocks: int, block_size: int, *, caching: bool, features: PoolFeatures = PLAIN) -> PoolArrays:
    """Make the arrays of an empty pool, with every block except the null block in the free queue.

    Cost: O(num_blocks); memory pages of ``tokens`` and ``digests`` are not touched before their first use.
    """
    arrays = PoolArrays(
        records=np.zeros((num_blocks + NUM_SENTINELS, NUM_FIELDS), np.int32),
        tokens=aligned_zeros(num_blocks, block_size if caching else 0),
        digests=np.zeros((num_blocks if caching else 0, DIGEST_WORDS), np.uint32),
        parent_digests=np.zeros((num_blocks if caching and features.keeps_parents else 0, DIGEST_WORDS), np.uint32),
        buckets=np.zeros(1 << (num_blocks * 3 // 4).bit_length() if caching else 1, np.int32),
        counts=np.zeros(NUM_COUNTS, np.int64),
        event_log=np.zeros((0, EVENT_FIELDS), np.uint32),
        eviction=np.zeros(0, np.int64),
        eviction_table=np.zeros((0, 2), np.uint32),
        ranks=np.zeros(0, np.uint8),
        eviction_blocks=np.zeros((0, 0), np.int32),
        eviction_runs=np.zeros((0, 0), np.int32),
        eviction_rates=np.zeros((0, 0), np.float32),
        ghosts=np.zeros((0, 16), np.uint32),
        epochs=np.zeros((num_blocks if features.epochs else 0, 2), np.int32),
        leases=np.zeros(num_blocks if features.leases else 0, np.float64),
        lease_links=np.zeros((num_blocks if features.leases else 0, 2), np.int32),
        siblings=np.zeros((num_blocks if features.siblings else 0, 2), np.int32),
        bounds=np.zeros((0, 4), np.int32),
        tenants=np.zeros((0, TENANT_FIELDS), np.int32),
    )
    arrays.records[1:num_blocks, QUEUE] = FREE
    arrays.counts[NUM_FREE] = num_blocks - 1
    link_all(arrays.records)
    arrays.counts[OPEN_STEP] = 1
    return arrays


# 0 is no cause.
EVICTED: Final = 1  # allocated for other content, while it was cached
SHED: Final = 2  # allocated for other content, while it was spare: left behind by a window, or superseded
OVERWRITTEN: Final = 3  # the row that referred to it was rolled back, or advanced its state in place
CALLED_OFF: Final = 4  # never computed: its step failed, or the row that was to compute it was freed
WITHDRAWN: Final = 5  # declared bad, or not distinguishable from bad content
RESET: Final = 6
OTHER_EPOCH: Final = 7  # other weights
INVALIDATED: Final = 8  # device memory released
DISMISSED: Final = 9  # forgotten on request
NUM_CAUSES: Final = 10
