"""The audit of one pool: its lists partition the blocks, and its index finds exactly the named blocks.

Compiled loops search for the first contradiction and return its number in :data:`FAULTS`, 0 if there is none. The
eviction policy checks its own arrays, and so do the features (:data:`FEATURE_AUDITS`). O(blocks).
"""

from typing import Final

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import (
    BUCKET_NEXT,
    DEFERRED,
    FREE,
    HOLD_STEP,
    IN_USE,
    KEPT,
    LEASED_ROOT,
    LIFE,
    NAME,
    NEXT,
    NULL_BLOCK,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_DEFERRED_LISTS,
    NUM_FREE,
    NUM_NAMED,
    NUM_SENTINELS,
    OPEN_STEP,
    PARENT,
    PARENT_LIFE,
    PENDING_STEP,
    PREVIOUS,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    SPARE,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.blocks.feature_audits import FEATURE_AUDITS
from pagedkv.blocks.free_queue import (
    blocks_of_list,
    deferred_sentinel,
    free_leased,
    protected_sentinel,
    spare_sentinel,
)
from pagedkv.blocks.moments import stays
from pagedkv.blocks.prefix_index import bucket_of, has_digest
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint8Array

__all__ = ["check_pool"]

FAULTS: Final = (
    "",
    "links forward and backward differ",
    "free queue and places differ",
    "an empty block waits behind a cached one",
    "a spare block waits among cached ones",
    "a block that is not spare waits among spare ones",
    "cached blocks miscounted",
    "a cached block is computed by no step",
    "a deferred block is due",
    "a block waits in another step's list",
    "a block waits for a step that has not begun",
    "deferred blocks miscounted",
    "deferred differ",
    "null block touched",
    "a block is referenced and queued, or neither",
    "negative reference count",
    "index and named blocks differ",
    "{block} is misplaced",
    "two blocks carry one name",
    "named blocks miscounted",
    "a parent is foreign",
    "the root died",
    "a successor is foreign",
)
(
    NONE,
    LINKS,
    FREE_DIFFER,
    EMPTY_BEHIND_CACHED,
    SPARE_ELSEWHERE,
    NOT_SPARE,
    CACHED_COUNT,
    PENDING_IN_NO_STEP,
    DUE,
    OTHER_LIST,
    NOT_BEGUN,
    DEFERRED_COUNT,
    DEFERRED_DIFFER,
    NULL_TOUCHED,
    REFERENCES,
    NEGATIVE,
    INDEX,
    MISPLACED,
    SAME_NAME,
    NAMED_COUNT,
    FOREIGN_PARENT,
    DEAD_ROOT,
    FOREIGN_SUCCESSOR,
) = range(len(FAULTS))


def check_pool(pool: BlockPool) -> None:
    """Check a pool's invariants. Raises AssertionError with the first contradiction. O(blocks)."""
    arrays = pool.arrays
    _require(pool, _links_fault(arrays))
    counted = int(arrays.counts[NUM_FREE])
    cold = blocks_of_list(arrays.records, NULL_BLOCK, counted)
    protected = blocks_of_list(arrays.records, protected_sentinel(arrays.records), counted)
    spare = blocks_of_list(arrays.records, spare_sentinel(arrays.records), counted)
    leased = np.flatnonzero(free_leased(arrays)).tolist()
    num_linked = len(cold) + len(spare) + len(leased) + len(protected)
    assert num_linked == counted, f"{pool.name}: {counted} blocks counted free, {num_linked} linked"
    _require(pool, _free_fault(arrays, np.array(cold + protected, np.int32), len(spare) + len(leased)))
    _require(pool, _spare_fault(arrays, np.array(spare, np.int32)))
    _require(pool, _deferred_fault(arrays))
    _require(pool, _places_fault(arrays))
    pool.policy.check(pool.name, arrays, cold, protected)
    _require(pool, _index_fault(arrays, np.zeros(pool.num_blocks, np.uint8)))
    _require(pool, *_identities_fault(arrays))
    _require(pool, _chains_fault(arrays))
    for check in FEATURE_AUDITS:
        check(pool)


def _require(pool: BlockPool, fault: int, block: int = NULL_BLOCK) -> None:
    assert fault == NONE, f"{pool.name}: {FAULTS[fault].format(block=block)}"


@compiled
def _links_fault(pool: PoolArrays) -> int:
    """Check that each member of a list is linked with its neighbours in both directions."""
    records = pool.records
    num_blocks = len(records) - NUM_SENTINELS
    for place in range(len(records)):
        is_block = place != NULL_BLOCK and place < num_blocks
        is_ordered = is_block and records[place, QUEUE] == FREE and stays(pool, place)
        if is_ordered or place == num_blocks + LEASED_ROOT or (is_block and records[place, QUEUE] <= IN_USE):
            continue
        following = records[place, NEXT]
        if following < 0 or following >= len(records) or records[following, PREVIOUS] != place:
            return LINKS
    return NONE


@compiled
def _spare_fault(pool: PoolArrays, spare: Int32Array) -> int:
    """Check that spare blocks are named, and that the open step is not to compute any."""
    for block in spare:
        record = pool.records[block]
        if record[QUEUE] != FREE or record[KEPT] != SPARE or not record[NAME]:
            return NOT_SPARE
        if record[PENDING_STEP] == pool.counts[OPEN_STEP]:
            return PENDING_IN_NO_STEP
    return NONE


@compiled
def _free_fault(pool: PoolArrays, order: Int32Array, num_spare: int) -> int:
    """Check the free blocks, except spare and leased ones, in their order: those without content come first."""
    records = pool.records
    num_cached = 0
    fault = NONE
    for block in order:
        if records[block, QUEUE] != FREE:
            return FREE_DIFFER
        if records[block, NAME]:
            num_cached += 1
            if records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
                fault = PENDING_IN_NO_STEP
            if records[block, KEPT] == SPARE:
                fault = SPARE_ELSEWHERE
        elif num_cached:
            fault = EMPTY_BEHIND_CACHED
    num_free = 0
    for block in range(1, len(records) - NUM_SENTINELS):
        num_free += records[block, QUEUE] == FREE
    if num_free != len(order) + num_spare:
        return FREE_DIFFER
    if fault == NONE and num_cached + num_spare != pool.counts[NUM_CACHED]:
        return CACHED_COUNT
    return fault


@compiled
def _deferred_fault(pool: PoolArrays) -> int:
    """Check that each deferred block is in the list of the step that it waits for, and that no such step is settled."""
    records, counts = pool.records, pool.counts
    num_linked = 0
    for step in range(NUM_DEFERRED_LISTS):
        sentinel = deferred_sentinel(records, step)
        block = records[sentinel, NEXT]
        while block != sentinel and num_linked <= counts[NUM_DEFERRED]:
            if records[block, HOLD_STEP] <= counts[SETTLED_STEP]:
                return DUE
            if records[block, HOLD_STEP] % NUM_DEFERRED_LISTS != step:
                return OTHER_LIST
            if records[block, HOLD_STEP] > counts[OPEN_STEP]:
                return NOT_BEGUN
            if records[block, QUEUE] != DEFERRED:
                return DEFERRED_DIFFER
            num_linked += 1
            block = records[block, NEXT]
    if num_linked != counts[NUM_DEFERRED]:
        return DEFERRED_COUNT
    num_deferred = 0
    for block in range(1, len(records) - NUM_SENTINELS):
        num_deferred += records[block, QUEUE] == DEFERRED
    return NONE if num_deferred == num_linked else DEFERRED_DIFFER


@compiled
def _places_fault(pool: PoolArrays) -> int:
    """Check that a block has references exactly while it is in no list, and that the null block is untouched."""
    records = pool.records
    for block in range(1, len(records) - NUM_SENTINELS):
        if (records[block, REF_COUNT] > 0) != (records[block, QUEUE] <= IN_USE):
            return REFERENCES
        if records[block, REF_COUNT] < 0:
            return NEGATIVE
    is_touched = records[NULL_BLOCK, REF_COUNT] or records[NULL_BLOCK, NAME] or records[NULL_BLOCK, LIFE]
    return NULL_TOUCHED if is_touched else NONE


@compiled
def _index_fault(pool: PoolArrays, is_indexed: Uint8Array) -> int:
    """Check that the buckets reach exactly the named blocks, each once."""
    records = pool.records
    num_blocks = len(records) - NUM_SENTINELS
    num_indexed = 0
    for first in pool.buckets:
        block = first
        while block != NULL_BLOCK:
            if block < 0 or block >= num_blocks or is_indexed[block] or not records[block, NAME]:
                return INDEX
            is_indexed[block] = 1
            num_indexed += 1
            block = records[block, BUCKET_NEXT]
    num_named = 0
    for block in range(num_blocks):
        num_named += records[block, NAME] != 0
    if num_named != num_indexed:
        return INDEX
    return NONE if num_named == pool.counts[NUM_NAMED] else NAMED_COUNT


@compiled
def _identities_fault(pool: PoolArrays) -> tuple[int, int]:
    """Check that each block is in the bucket of its name, and that names are unique."""
    records = pool.records
    for bucket in range(len(pool.buckets)):
        block = pool.buckets[bucket]
        while block != NULL_BLOCK:
            if bucket_of(pool, records[block, NAME], pool.digests[block]) != bucket:
                return MISPLACED, int(block)
            other = records[block, BUCKET_NEXT]
            while other != NULL_BLOCK:
                if records[other, NAME] == records[block, NAME] and has_digest(pool, other, pool.digests[block]):
                    return SAME_NAME, int(block)
                other = records[other, BUCKET_NEXT]
            block = records[block, BUCKET_NEXT]
    return NONE, NULL_BLOCK


@compiled
def _chains_fault(pool: PoolArrays) -> int:
    """Check that the links of chains stay within the pool, and that the null block's life never changes."""
    records = pool.records
    num_blocks = len(records) - NUM_SENTINELS
    for block in range(num_blocks):
        if records[block, NAME]:
            parent = records[block, PARENT]
            if parent < 0 or parent >= num_blocks:
                return FOREIGN_PARENT
            if parent == NULL_BLOCK and records[block, PARENT_LIFE] != records[NULL_BLOCK, LIFE]:
                return DEAD_ROOT
        if records[block, SUCCESSOR] < 0 or records[block, SUCCESSOR] >= num_blocks:
            return FOREIGN_SUCCESSOR
    return NONE
