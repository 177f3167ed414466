"""What is known of each block of one pool: flat arrays, one record of small integers a block.

Owns the layout and nothing else: :mod:`pagedkv.memory.tables.owners` says which module writes which column. A block's
record is 14 int32 beside each other, since every operation that touches a block reads several of them
(reference count, links, name), and one cache line then serves all; see
docs/decisions/0002-block-records.md. Zero means "nothing" in every column, so that a million blocks cost
one ``np.zeros``: block 0 is the null block, never linked, named or handed out, which makes its id
free to mean "none", and its record serves as the free queue's sentinel.

Bytes a block, at 16 tokens::

    record 14 x 4 = 56 | tokens 16 x 4 = 64 | digest 32 | index bucket 3..6      = 155..158

and what the eviction policy keeps: nothing for LRU, 8 bytes for FIFO, 33 to 65 for the adaptive one, 218 to 250 for the
one that learns; and what :class:`PoolFeatures` asks for.
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.memory.contract.arrays import Float32Array, Float64Array, Int32Array, Int64Array, Uint8Array, Uint32Array

__all__ = ["PLAIN", "PoolArrays", "PoolFeatures", "aligned_zeros"]


NULL_BLOCK: Final = 0
CACHE_LINE_NBYTES: Final = 64

# Columns of a record. Those that a decode step reads, and those that a walk along a prompt's chain reads, stand beside
# each other, so that they share a cache line in most records. tables/owners.py says which module writes each.
BUCKET_NEXT: Final = 0  # next named block in the same bucket
HOLD_STEP: Final = 1  # last step whose plan touches it, or that may still read or write it
RELEASED: Final = HOLD_STEP  # of a free leased block, which no step holds: when it was released, counted in such
NEXT: Final = 2  # neighbours in the free queue or in a deferred list; 0 is the free queue's sentinel
PREVIOUS: Final = 3
REF_COUNT: Final = 4  # table entries that point here, and tickets that hold it
QUEUE: Final = 5  # where the block is: NEW or IN_USE, FREE or DEFERRED; the first column that a walk reads
PENDING_STEP: Final = 6  # last step that writes tokens here; computed once that step is settled
NAME: Final = 7  # 0: not findable; otherwise 1 + index of the group
LIFE: Final = 8  # grows whenever the content is given up, so that old links to it die
PARENT: Final = 9  # the named block before it, and the life in which it was the parent
PARENT_LIFE: Final = 10
EXTRA: Final = 11  # id of its extra keys (0: none)
SUCCESSOR: Final = 12  # its most recently named child
AHEAD: Final = 13  # a block LOOKAHEAD places further down its chain, or 0: what a walk is to fetch; never trusted
KEPT: Final = AHEAD  # in a window group, which is not walked: why it stays cached when nobody holds it, or SPARE
NUM_FIELDS: Final = 14

FIRST_WALK_FIELD: Final = QUEUE
LAST_WALK_FIELD: Final = AHEAD
LOOKAHEAD: Final = (
    16  # a walk over 8,192 shuffled blocks, caches cold: 1,300 us without, 246 for 8, 169 for 16, 164 for 24
)

# Values of QUEUE; up to IN_USE a block has references.
NEW: Final = -1  # in use, handed out since the last plan, and nobody's content is in it or on its way by a move
IN_USE: Final = 0
FREE: Final = 1
DEFERRED: Final = 2

SPARE: Final = -1  # value of KEPT: for no reason; it is cached only while there is room (spare_blocks.py)

# Places in ``counts``.
NUM_FREE: Final = 0
NUM_DEFERRED: Final = 1
NUM_NAMED: Final = 2
NUM_CACHED: Final = 3  # free blocks with a name
NUM_EVICTED: Final = 4  # cumulative, like all below
NUM_HIT_BLOCKS: Final = 5
NUM_ACQUIRED: Final = 6
NUM_EVENTS: Final = 7  # events since the log was drained, lost ones included
OPEN_STEP: Final = 8  # number of the step being put together
SETTLED_STEP: Final = 9  # every step up to this one is acknowledged or aborted
IN_ORDER: Final = 10  # 1 if blocks wait for moves only, since steps are carried out in order; never changes
CLOCK_US: Final = 11  # the caller's clock, in microseconds, as last told
HAS_CLOCK: Final = 12  # 1 once it was told at all
NUM_LEASED: Final = 13  # free blocks with a lease
NUM_RELEASED: Final = 14  # releases of leased blocks, as counted in RELEASED
IN_SETS: Final = 15  # groups of the pool whose blocks hit only beside those of other groups; never changes
NUM_COUNTS: Final = 16

NUM_DEFERRED_LISTS: Final = 16  # a power of two; step s has list s % 16
NUM_SENTINELS: Final = 3 + NUM_DEFERRED_LISTS  # records behind those of the blocks
LEASED_ROOT: Final = 2  # of these the one that is no sentinel: the root of the leased blocks (pool/treap.py)

# Columns of ``epochs`` (pool/epochs.py).
OLDEST: Final = 0
NEWEST: Final = 1
UNDATED: Final = 2**31 - 1  # in both: no plan has computed anything into it yet

TENANT_FIELDS: Final = 4  # of ``tenants`` (pool/tenant_charges.py)
CHARGED: Final = 0  # the first of them: which tenant a block is charged to
DIGEST_WORDS: Final = 8
EVENT_FIELDS: Final = 3 + 2 * DIGEST_WORDS  # kind, name, block, digest, parent's digest


class PoolArrays(NamedTuple):
    """The state of one pool, as compiled loops take it.

    Args:
        records: int32 ``[num_blocks + NUM_SENTINELS, NUM_FIELDS]``; behind the blocks stand the sentinels of the
            protected list and of the spare blocks, the root of the leased ones, and the sentinels of the lists of
            deferred blocks.
        tokens: int32 ``[num_blocks, block_size]``; ``[num_blocks, 0]`` without prefix caching.
        digests: uint32 ``[num_blocks, 8]``, big-endian words of the SHA-256; ``[0, 8]`` without caching.
        buckets: int32 ``[power of two]``, first block of each bucket of the prefix index; 3/4 to 3/2 a block.
        counts: int64 ``[NUM_COUNTS]``.
        event_log: uint32 ``[capacity, EVENT_FIELDS]``, a ring; capacity 0 means that events are off.
        eviction: int64, counts of the eviction policy; these six are as long as it wants them
            (:class:`~pagedkv.memory.pool.eviction.policy.PolicyState`), and empty where it is LRU.
        eviction_table: uint32 ``[any, any]``, the policy's table.
        ranks: uint8, what the policy thinks of each block.
        eviction_blocks: int32 ``[any, any]``, more of that.
        eviction_runs: int32 ``[any, any]``, what it knows of blocks that were released together.
        eviction_rates: float32 ``[any, any]``, what it has learnt.
        ghosts: uint32 ``[sets, SET_WORDS]``, what is remembered of content that is gone
            (:mod:`pagedkv.memory.pool.ghosts`); empty if nothing is.
        epochs: int32 ``[num_blocks, 2]``, the oldest and the newest epoch of the weights that contributed to each block
            (:mod:`pagedkv.memory.pool.epochs`); ``[0, 2]`` where epochs are not counted.
        leases: float64 ``[num_blocks]``, until when each block is kept (:mod:`pagedkv.memory.pool.leasing`); ``[0]``
            without leases.
        lease_links: int32 ``[num_blocks, 2]``, links between the free leased blocks that continue the same block
            (:mod:`pagedkv.memory.pool.lease_order`); ``[0, 2]`` without leases.
        siblings: int32 ``[num_blocks, 2]``, links between the children of each block; ``[0, 2]`` if they are not kept.
        bounds: int32 ``[num_blocks + names, 4]``, the cached blocks of groups that are to keep only so many
            (:mod:`pagedkv.memory.pool.cached_bounds`); ``[0, 4]`` if there are none.
        tenants: int32 ``[num_blocks + 4 * tenants, 4]``, whom each block is charged to, and what each tenant has
            (:mod:`pagedkv.memory.pool.tenant_charges`); ``[0, 4]`` without tenants.
    """

    records: Int32Array
    tokens: Int32Array
    digests: Uint32Array
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
    """Make an int32 array of zeros whose rows begin at cache lines if they are as long."""
    spare = CACHE_LINE_NBYTES // 4
    flat = np.zeros(num_rows * num_columns + spare, np.int32)
    start = -flat.ctypes.data % CACHE_LINE_NBYTES // 4
    return flat[start : start + num_rows * num_columns].reshape(num_rows, num_columns)


class PoolFeatures(NamedTuple):
    """What a pool keeps only where it is asked for.

    Args:
        ghosts: so many digests at least of content that is gone, 13 bytes each (:mod:`pagedkv.memory.pool.ghosts`).
        epochs: which epochs of the weights contributed to each block, 8 bytes (:mod:`pagedkv.memory.pool.epochs`).
        leases: until when content is to stay, 16 bytes a block (:mod:`pagedkv.memory.pool.leasing`).
        siblings: links between the blocks that continue the same block, 8 bytes (:mod:`pagedkv.memory.pool.siblings`).
        bounds: by name, how many cached blocks are kept at most, 16 bytes a block
            (:mod:`pagedkv.memory.pool.cached_bounds`).
        limits: cap and floor of each tenant, in blocks, the first one for whoever names none; 16 bytes a block and 64 a
            tenant (:mod:`pagedkv.memory.pool.tenant_charges`). Empty: blocks are charged to nobody.
        events: so many events of names that come and go, the latest, wait to be drained
            (:mod:`pagedkv.memory.pool.event_log`). 0: none are recorded.
        num_in_sets: groups of the pool with prefix caching, if there is another such group in this pool or elsewhere: a
            hit takes blocks of all. 0 if blocks hit by themselves.
        others_have: another pool of the space has some of that, so that the code that serves it serves this pool too.
    """

    ghosts: int = 0
    epochs: bool = False
    leases: bool = False
    siblings: bool = False
    bounds: tuple[tuple[int, int], ...] = ()
    limits: tuple[tuple[int, int], ...] = ()
    events: int = 0
    num_in_sets: int = 0
    others_have: bool = False


PLAIN: Final = PoolFeatures()
