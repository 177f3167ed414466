"""The audit of one pool: its lists partition the blocks, and its index finds exactly the named blocks.

Compiled loops search for the first contradiction and return its number in :data:`FAULTS`, 0 if there is none. The
eviction policy checks its own arrays, and so do the features (:data:`FEATURE_AUDITS`). O(blocks).

With tenants, every block is charged to one of them, and every account adds up. With leases, every leased block is
named, and every free one is at its place in the order of leases.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.cached_bounds import first_unbounded
from pagedkv.blocks.eviction.policy import LRU
from pagedkv.blocks.free_queue import (
    blocks_of_list,
    deferred_sentinel,
    free_leased,
    is_leased,
    protected_sentinel,
    spare_sentinel,
)
from pagedkv.blocks.ghosts import GHOSTS_A_SET, are_same, find_ghost, ghost_cause, is_ghost
from pagedkv.blocks.leasing import first_misplaced
from pagedkv.blocks.prefix_index import bucket_of, has_digest
from pagedkv.blocks.record import (
    ABSENT,
    BUCKET_NEXT,
    CHARGED,
    DEFERRED,
    FREE,
    HOLD_STEP,
    IN_USE,
    KEPT,
    LEASED_ROOT,
    LIFE,
    NAME,
    NEXT,
    NO_TENANT,
    NULL_BLOCK,
    NUM_ABSENT,
    NUM_CACHED,
    NUM_CAUSES,
    NUM_DEFERRED,
    NUM_DEFERRED_LISTS,
    NUM_FREE,
    NUM_LEASED,
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
from pagedkv.blocks.siblings import first_unlinked
from pagedkv.blocks.tenant_charges import (
    AFTER,
    BEFORE,
    CAP,
    CLOCK,
    CLOCK_MASK,
    FLOOR,
    IN_CACHED,
    IN_LEASED,
    IN_SPARE,
    NUM_RESERVED,
    NUM_RESTING,
    NUM_TAKEN,
    STAMP,
    list_of,
)
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint8Array

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
    "absent blocks miscounted",
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
    ABSENT_COUNT,
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
        is_ordered = is_block and records[place, QUEUE] == FREE and is_leased(pool, place)
        is_linked = not is_block or (records[place, QUEUE] > IN_USE and records[place, QUEUE] != ABSENT)
        if is_ordered or place == num_blocks + LEASED_ROOT or not is_linked:
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
    """Check that present blocks have references exactly while in no list, and that the null block is untouched."""
    records = pool.records
    num_absent = 0
    for block in range(1, len(records) - NUM_SENTINELS):
        if (records[block, REF_COUNT] > 0) != (records[block, QUEUE] <= IN_USE):
            return REFERENCES
        if records[block, REF_COUNT] < 0:
            return NEGATIVE
        num_absent += records[block, QUEUE] == ABSENT
    if num_absent != pool.counts[NUM_ABSENT]:
        return ABSENT_COUNT
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


def _check_siblings(pool: BlockPool) -> None:
    unlinked = first_unlinked(pool.arrays)
    assert unlinked == NULL_BLOCK, f"{pool.name}: block {unlinked} is not linked with its siblings"


def _check_bounds(pool: BlockPool) -> None:
    unbounded = first_unbounded(pool.arrays, np.zeros(len(pool.arrays.bounds), np.uint8))
    assert unbounded == NULL_BLOCK, f"{pool.name}: place {unbounded} is not where a bound on cached blocks has it"


def _check_parents(pool: BlockPool) -> None:
    arrays, records = pool.arrays, pool.arrays.records[: pool.num_blocks]
    if not len(arrays.parent_digests):
        return
    children = np.flatnonzero(records[:, NAME])
    parents = records[children, PARENT]
    is_there = (parents != NULL_BLOCK) & (records[parents, LIFE] == records[children, PARENT_LIFE])
    children, parents = children[is_there], parents[is_there]
    is_wrong = (arrays.parent_digests[children] != arrays.digests[parents]).any(axis=1)
    assert not is_wrong.any(), f"{pool.name}: block {children[is_wrong][0]} has the digest of another parent"


def check_charges(pool: BlockPool) -> None:
    """Check that the accounts agree with the blocks; no effect without tenants. Raises AssertionError."""
    arrays = pool.arrays
    if not len(arrays.tenants):
        return
    tenants, is_free = arrays.tenants, arrays.records[: pool.num_blocks, QUEUE] == FREE
    charged = tenants[1 : pool.num_blocks, CHARGED]
    numbers = range(len(pool.accounts))
    assert ((charged >= 0) & (charged < len(numbers))).all(), f"{pool.name}: a block is charged to no tenant"
    is_empty = is_free & (arrays.records[: pool.num_blocks, NAME] == 0)
    assert (tenants[np.flatnonzero(is_empty), CHARGED] == NO_TENANT).all(), f"{pool.name}: an empty block is charged"
    accounts = pool.accounts
    is_taken = ~is_free & (arrays.records[: pool.num_blocks, QUEUE] != ABSENT)
    taken = np.bincount(charged[is_taken[1:]], minlength=len(numbers))
    assert (accounts[:, NUM_TAKEN] == taken).all(), f"{pool.name}: blocks that tenants have taken are miscounted"
    promised = int(np.maximum(0, accounts[:, FLOOR] - taken).sum())
    assert tenants[NULL_BLOCK, NUM_RESERVED] == promised, f"{pool.name}: floors promise {promised} more blocks"
    is_within = accounts[:, NUM_TAKEN] + accounts[:, NUM_RESTING] <= accounts[:, CAP]
    assert is_within.all(), f"{pool.name}: tenant {is_within.argmin()} is above its cap"
    assert accounts[:, NUM_RESTING].sum() == arrays.counts[NUM_CACHED], f"{pool.name}: cached blocks are miscounted"
    cold = blocks_of_list(arrays.records, NULL_BLOCK, int(arrays.counts[NUM_FREE]))  # LRU evicts in its order
    for tenant in numbers:
        _check_lists(pool, tenant, int(accounts[tenant, NUM_RESTING]), cold)


def check_leases(pool: BlockPool) -> None:
    """Check the leases. Raises AssertionError with the first contradiction. O(blocks)."""
    misplaced = first_misplaced(pool.arrays)
    assert misplaced == NULL_BLOCK, f"{pool.name}: leased block {misplaced} is not where the order of leases has it"
    fault = _leased_fault(pool.arrays, np.flatnonzero(free_leased(pool.arrays)).astype(np.int32))
    assert fault == NO_FAULT, f"{pool.name}: {LEASE_FAULTS[fault]}"


def check_ghosts(pool: BlockPool) -> None:
    """Check the ghosts. Raises AssertionError with the first contradiction. O(blocks + ghosts)."""
    fault = _ghosts_fault(pool.arrays)
    assert fault == NO_GHOST_FAULT, f"{pool.name}: {GHOST_FAULTS[fault]}"


FEATURE_AUDITS: Final[tuple[Callable[[BlockPool], None], ...]] = (
    check_leases,
    check_charges,
    check_ghosts,
    _check_siblings,
    _check_bounds,
    _check_parents,
)
"""Each checks the invariants of a feature, and raises AssertionError. O(blocks)."""


def _check_lists(pool: BlockPool, tenant: int, num_cached: int, cold: list[int]) -> None:
    """Check that a tenant's lists hold its cached blocks, each in the list of its kind, in the order of release."""
    arrays, where = pool.arrays, f"{pool.name}, tenant {tenant}"
    num_listed = 0
    for kind in (IN_SPARE, IN_CACHED, IN_LEASED):
        listed = _walk(arrays.tenants, list_of(arrays, tenant, kind), num_cached)
        num_listed += len(listed)
        mine = set(listed)
        assert all(_kind_of(arrays, block) == kind for block in listed), f"{where}: a block is in another kind's list"
        assert (arrays.tenants[listed, CHARGED] == tenant).all(), f"{where}: a block is in another tenant's list"
        ages = (arrays.tenants[NULL_BLOCK, CLOCK].astype(int) - arrays.tenants[listed, STAMP]) & CLOCK_MASK
        assert (np.diff(ages) < 0).all(), f"{where}: blocks are listed out of the order of their release"
        if kind == IN_CACHED and pool.policy is LRU:
            own = [block for block in cold if block in mine]
            assert own == listed, f"{where}: its blocks would be evicted in another order than all"
    assert num_listed == num_cached, f"{where}: {num_cached} cached blocks, {num_listed} listed"


def _walk(tenants: Int32Array, sentinel: int, most: int) -> list[int]:
    """Read a list of at most ``most`` blocks, checking the links in both directions."""
    listed: list[int] = []
    place = sentinel
    while (following := int(tenants[place, AFTER])) != sentinel and len(listed) <= most:
        assert tenants[following, BEFORE] == place, f"block {following} of a list does not stand behind {place}"
        listed.append(following)
        place = following
    return listed


def _kind_of(pool: PoolArrays, block: int) -> int:
    """Return the list that a block belongs to; -1 if none."""
    if pool.records[block, QUEUE] != FREE or not pool.records[block, NAME]:
        return -1
    if len(pool.leases) and pool.leases[block] > 0:
        return IN_LEASED
    return IN_SPARE if pool.records[block, KEPT] == SPARE else IN_CACHED


LEASE_FAULTS: Final = (
    "",
    "a block without a lease waits among leased ones",
    "a leased block waits elsewhere, or has no name",
    "a cached block is computed by no step",
)
NO_FAULT, NOT_LEASED, LEASED_ELSEWHERE, LEASE_PENDING_IN_NO_STEP = range(len(LEASE_FAULTS))


@compiled
def _leased_fault(pool: PoolArrays, leased: Int32Array) -> int:
    """Check that the free leased blocks are exactly those counted and listed, and that every leased block is named."""
    records = pool.records
    for block in leased:
        if records[block, QUEUE] != FREE or not is_leased(pool, block) or records[block, KEPT] == SPARE:
            return NOT_LEASED
        if records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
            return LEASE_PENDING_IN_NO_STEP
    num_leased = 0
    for block in range(1, len(pool.leases)):
        if is_leased(pool, block):
            num_leased += records[block, QUEUE] == FREE
            if not records[block, NAME]:
                return LEASED_ELSEWHERE
    is_counted = num_leased == len(leased) and num_leased == pool.counts[NUM_LEASED]
    return NO_FAULT if is_counted else LEASED_ELSEWHERE


GHOST_FAULTS: Final = (
    "",
    "a ghost of content that can be found",
    "two ghosts of one content",
    "a ghost gone for no reason",
)
NO_GHOST_FAULT, GHOST_OF_NAMED, SAME_GHOST, NO_CAUSE = range(len(GHOST_FAULTS))


@compiled
def _ghosts_fault(pool: PoolArrays) -> int:
    """Check that at most one for content, none if it is cached; each has a cause of loss."""
    for block in range(len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and find_ghost(pool, pool.records[block, NAME], pool.digests[block]) >= 0:
            return GHOST_OF_NAMED
    for number in range(len(pool.ghosts)):
        for way in range(GHOSTS_A_SET):
            place = number * GHOSTS_A_SET + way
            if not is_ghost(pool, place):
                continue
            if not 0 < ghost_cause(pool, place) < NUM_CAUSES:
                return NO_CAUSE
            for other in range(place + 1, (number + 1) * GHOSTS_A_SET):
                if are_same(pool, place, other):
                    return SAME_GHOST
    return NO_GHOST_FAULT
