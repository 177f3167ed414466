"""What is known of each block of one pool: flat arrays, one record of small integers a block.

Owns the layout and nothing else: who may change which column is said beside the column. A block's
record is 14 int32 beside each other, since every operation that touches a block reads several of them
(reference count, links, name), and one cache line then serves all; see
docs/decisions/0002-block-records.md. Zero means "nothing" in every column, so that a million blocks cost
one ``np.zeros``: block 0 is the null block, never linked, named or handed out, which makes its id
free to mean "none", and its record serves as the free queue's sentinel.

Bytes a block, at 16 tokens::

    record 14 x 4 = 56 | tokens 16 x 4 = 64 | digest 32 | index bucket 3..6      = 155..158

and with the adaptive eviction policy its ghost table, 32 to 64 bytes more.
"""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Int32Array", "Int64Array", "PoolArrays", "Uint8Array", "Uint32Array", "aligned_zeros", "new_pool_arrays"]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Uint32Array: TypeAlias = npt.NDArray[np.uint32]
Uint8Array: TypeAlias = npt.NDArray[np.uint8]

NULL_BLOCK: Final = 0
CACHE_LINE_NBYTES: Final = 64

# Columns of a record, those that a decode step touches first, so that they share a cache line.
# Owned by pool.py and free_queue.py, but for PENDING_STEP and EXTRA (tables.py, swapping.py, space/naming.py)
# and the links between names (prefix_index.py).
REF_COUNT: Final = 0  # table entries that point here
PENDING_STEP: Final = 1  # last step that writes tokens here; computed once that step is settled
NAME: Final = 2  # 0: not findable; otherwise 1 + index of the group
QUEUE: Final = 3  # where the block is: IN_USE, FREE or DEFERRED
HOLD_STEP: Final = 4  # last step whose plan touches it, or that may still read or write it
NEXT: Final = 5  # neighbours in the free queue or among the deferred; 0 is the free queue's sentinel
PREVIOUS: Final = 6
LIFE: Final = 7  # grows whenever the content is given up, so that old links to it die
PARENT: Final = 8  # the named block before it, and the life in which it was the parent
PARENT_LIFE: Final = 9
SUCCESSOR: Final = 10  # its most recently named child
EXTRA: Final = 11  # id of its extra keys (0: none)
BUCKET_NEXT: Final = 12  # next named block in the same bucket
RANK: Final = 13  # what the eviction policy thinks of a named block: PROTECTED, REUSED (eviction.py)
NUM_FIELDS: Final = 14

# Bits of RANK.
PROTECTED: Final = 1
REUSED: Final = 2

# Values of QUEUE.
IN_USE: Final = 0
FREE: Final = 1
DEFERRED: Final = 2

# Places in ``counts``.
NUM_FREE: Final = 0
NUM_DEFERRED: Final = 1
NUM_NAMED: Final = 2
NUM_CACHED: Final = 3  # free blocks with a name
NUM_EVICTED: Final = 4  # cumulative, like all below
NUM_HIT_BLOCKS: Final = 5
NUM_ACQUIRED: Final = 6
NUM_EVENTS: Final = 7  # rows in the event log
OPEN_STEP: Final = 8  # number of the step being put together
SETTLED_STEP: Final = 9  # every step up to this one is acknowledged or aborted
NUM_COUNTS: Final = 10

# Places in ``eviction``, all of them the adaptive policy's.
TARGET: Final = 0  # protected blocks that there should be at most, in sixteenths
NUM_PROTECTED: Final = 1  # named blocks that are protected, in use or free
FLOW_COLD: Final = 2  # evictions of late of blocks that were never hit
FLOW_REUSED: Final = 3  # and of blocks that were
EVICTION_COUNTDOWN: Final = 4  # evictions until both flows are halved
EVICTION_FIELDS: Final = 5

NUM_SENTINELS: Final = 2  # records behind those of the blocks

DIGEST_WORDS: Final = 8
EVENT_FIELDS: Final = 3 + 2 * DIGEST_WORDS  # kind, name, block, digest, parent's digest


class PoolArrays(NamedTuple):
    """The state of one pool, as compiled loops take it.

    Args:
        records: int32 ``[num_blocks + 2, NUM_FIELDS]``; the last two are the sentinels of the deferred queue and of
            the protected list.
        tokens: int32 ``[num_blocks, block_size]``; ``[num_blocks, 0]`` without prefix caching.
        digests: uint32 ``[num_blocks, 8]``, big-endian words of the SHA-256; ``[0, 8]`` without caching.
        buckets: int32 ``[power of two]``, first block of each bucket of the prefix index; 3/4 to 3/2 a block.
        counts: int64 ``[NUM_COUNTS]``.
        event_log: uint32 ``[capacity, EVENT_FIELDS]``; capacity 0 means that events are off.
        eviction: int64 ``[EVICTION_FIELDS]``, counts of the eviction policy.
        ghosts: uint32 ``[power of two, 2]``, digests of evicted blocks; ``[0, 2]`` where the policy is LRU.
    """

    records: Int32Array
    tokens: Int32Array
    digests: Uint32Array
    buckets: Int32Array
    counts: Int64Array
    event_log: Uint32Array
    eviction: Int64Array
    ghosts: Uint32Array


def aligned_zeros(num_rows: int, num_columns: int) -> Int32Array:
    """Make an int32 array of zeros whose rows begin at cache lines if they are as long."""
    spare = CACHE_LINE_NBYTES // 4
    flat = np.zeros(num_rows * num_columns + spare, np.int32)
    start = -flat.ctypes.data % CACHE_LINE_NBYTES // 4
    return flat[start : start + num_rows * num_columns].reshape(num_rows, num_columns)


def new_pool_arrays(num_blocks: int, block_size: int, *, caching: bool) -> PoolArrays:
    """Make the arrays of an empty pool, every block but the null block in the free queue.

    Cost: O(num_blocks); pages of ``tokens`` and ``digests`` are not touched before they are used.
    """
    arrays = PoolArrays(
        records=np.zeros((num_blocks + NUM_SENTINELS, NUM_FIELDS), np.int32),
        tokens=aligned_zeros(num_blocks, block_size if caching else 0),
        digests=np.zeros((num_blocks if caching else 0, DIGEST_WORDS), np.uint32),
        buckets=np.zeros(1 << (num_blocks * 3 // 4).bit_length() if caching else 1, np.int32),
        counts=np.zeros(NUM_COUNTS, np.int64),
        event_log=np.zeros((0, EVENT_FIELDS), np.uint32),
        eviction=np.zeros(EVICTION_FIELDS, np.int64),
        ghosts=np.zeros((0, 2), np.uint32),
    )
    arrays.counts[NUM_FREE] = num_blocks - 1
    arrays.counts[OPEN_STEP] = 1
    records = arrays.records[:num_blocks]
    records[:, NEXT] = np.arange(1, num_blocks + 1)
    records[:, PREVIOUS] = np.arange(-1, num_blocks - 1)
    records[1:, QUEUE] = FREE
    records[0, PREVIOUS] = num_blocks - 1
    records[-1, NEXT] = NULL_BLOCK
    sentinels = np.arange(num_blocks, num_blocks + NUM_SENTINELS)
    arrays.records[sentinels, NEXT] = sentinels
    arrays.records[sentinels, PREVIOUS] = sentinels
    return arrays
