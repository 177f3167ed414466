"""The adaptive policy: a segmented LRU with a protected list that adapts its size.

::

    cold:       without content | least recently used ... most recently used
    protected:                    least recently used ... most recently used

It is a segmented LRU (Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", IEEE Computer
27(3), 1994) with a protected part that adapts its size, as in ARC (Megiddo and Modha, FAST 2003). A block that is hit
becomes protected. When there are more protected blocks than the target, the least recently used of them go to the back
of the cold list. A *ghost table* stores the digests of evicted blocks. Content that is computed again soon after its
eviction (within as many allocations as there are blocks) is protected from the start, and changes the target if this
happens within a quarter of them. If it had never been hit before its eviction, blocks stay too briefly in the cold
list, and the target falls; if it had been hit, the target rises. The change is inversely proportional to the rate at
which blocks of that kind are evicted, so the target settles where one more block has the same value in either list.
docs/decisions/0008-eviction.md describes the alternatives and measurements.

The policy is *prefix-closed*: a hit on a block is a hit on all blocks before it; new content is protected only under a
protected parent in use; and of one sequence the tail is released before the head. So of two cached blocks of a chain,
the later is never behind the earlier in one list, nor in the protected list while the earlier is in the cold one.
"""

from typing import ClassVar, Final

import numpy as np

from pagedkv.blocks.eviction.policy import TABLE_FIELDS, EvictionPolicy, PolicyMoments, PolicyState, no_state
from pagedkv.blocks.free_queue import link_before, protected_sentinel, put_last, unlink
from pagedkv.blocks.record import (
    IN_USE,
    LIFE,
    NAME,
    NEXT,
    NULL_BLOCK,
    NUM_ACQUIRED,
    NUM_SENTINELS,
    PARENT,
    PARENT_LIFE,
    QUEUE,
    FeaturedArrays,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array

# Bits of a block's rank.
PROTECTED: Final = 1
REUSED: Final = 2

# The policy's counts.
TARGET: Final = 0  # most protected blocks, in sixteenths
NUM_PROTECTED: Final = 1  # named blocks that are protected, in use or free
FLOW_COLD: Final = 2  # recent evictions of blocks that were never hit
FLOW_REUSED: Final = 3  # recent evictions of blocks that were hit
EVICTION_COUNTDOWN: Final = 4  # evictions until both flows are halved
NUM_COUNTS: Final = 5

# Columns of the ghost table, which has a power of two of rows.
FINGERPRINT: Final = 0  # the digest's second word with a bit for REUSED
CLOCK: Final = 1  # NUM_ACQUIRED at its eviction

FIXED_POINT: Final = 16  # the target counts sixteenths of a block
VOTE: Final = 8  # change of the target, half a block, before it is weighted
FIRST_TARGET_DIVISOR: Final = 8  # an eighth of the blocks
VOTING_REACH: Final = 4  # content that returns within a quarter of the blocks allocated changes the target
GHOSTS_PER_BLOCK: Final = 4  # slots, so that few digests overwrite each other
FEW_GHOSTS: Final = 1 << 4
GHOST_CLOCK: Final = 2**32 - 1
EMPTY: Final = 0  # a clock at which nothing is evicted; when it wraps around, one ghost is lost


def _new_state(num_blocks: int) -> PolicyState:
    """Make an empty ghost table, and the first target."""
    counts = np.zeros(NUM_COUNTS, np.int64)
    counts[TARGET] = num_blocks * FIXED_POINT // FIRST_TARGET_DIVISOR
    counts[[FLOW_COLD, FLOW_REUSED]] = 1
    counts[EVICTION_COUNTDOWN] = num_blocks
    num_ghosts = max(FEW_GHOSTS, 1 << (GHOSTS_PER_BLOCK * num_blocks - 1).bit_length())
    table = np.zeros((num_ghosts, TABLE_FIELDS), np.uint32)
    return no_state(num_blocks)._replace(counts=counts, table=table, ranks=np.zeros(num_blocks + 1, np.uint8))


@inlined
def num_usable(records: Int32Array) -> int:
    """Count the blocks of a pool that can be allocated: all except the null block."""
    return len(records) - NUM_SENTINELS - 1


@inlined
def _protect(pool: PoolArrays, block: int) -> None:
    """Protect a block because of a hit."""
    if not pool.ranks[block] & PROTECTED:
        pool.eviction[NUM_PROTECTED] += 1
    pool.ranks[block] = PROTECTED | REUSED


@compiled
def _recall(pool: PoolArrays, block: int) -> None:
    """Protect content that was evicted recently, if its parent is protected; adapt the target."""
    ghosts, state = pool.eviction_table, pool.eviction
    parent = pool.records[block, PARENT]
    if parent != NULL_BLOCK and not _is_protected_in_use(pool, block, parent):
        return
    ghost = ghosts[int(pool.digests[block, 0]) & (len(ghosts) - 1)]
    if ghost[CLOCK] == EMPTY or (int(ghost[FINGERPRINT]) | 1) != (int(pool.digests[block, 1]) | 1):
        return
    num_blocks = num_usable(pool.records)
    away = (int(pool.counts[NUM_ACQUIRED]) - int(ghost[CLOCK])) & GHOST_CLOCK
    if away > num_blocks:
        return
    if away * VOTING_REACH <= num_blocks:
        flow = state[FLOW_COLD] + state[FLOW_REUSED]
        if ghost[FINGERPRINT] & 1:
            state[TARGET] += VOTE * flow // state[FLOW_REUSED]
        else:
            state[TARGET] -= VOTE * flow // state[FLOW_COLD]
        state[TARGET] = max(0, min(state[TARGET], num_blocks * (FIXED_POINT - 1)))
    ghost[CLOCK] = EMPTY
    _protect(pool, block)


@inlined
def _is_protected_in_use(pool: PoolArrays, block: int, parent: int) -> bool:
    """Whether a block's parent is protected, and cannot be evicted before the block is released."""
    is_alive = pool.records[parent, LIFE] == pool.records[block, PARENT_LIFE]
    return bool(is_alive and pool.ranks[parent] & PROTECTED and pool.records[parent, QUEUE] <= IN_USE)


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced cached block at the back of its list."""
    if pool.ranks[block] & PROTECTED:
        _enqueue_protected(pool, block)
    else:
        put_last(pool, block)


@compiled
def _enqueue_protected(pool: PoolArrays, block: int) -> None:
    """Put a block at the back of the protected list; move those beyond the target from its front to the cold list."""
    records, state = pool.records, pool.eviction
    put_last(pool, block)
    unlink(records, block)
    sentinel = protected_sentinel(records)
    link_before(records, sentinel, block)
    while state[NUM_PROTECTED] * FIXED_POINT > state[TARGET] and records[sentinel, NEXT] != sentinel:
        oldest = records[sentinel, NEXT]
        unlink(records, oldest)
        link_before(records, NULL_BLOCK, oldest)
        pool.ranks[oldest] = REUSED
        state[NUM_PROTECTED] -= 1


@compiled
def _remember(pool: PoolArrays, block: int) -> None:
    """Store a ghost of content that is evicted."""
    state = pool.eviction
    reused = 1 if pool.ranks[block] & REUSED else 0
    ghost = pool.eviction_table[int(pool.digests[block, 0]) & (len(pool.eviction_table) - 1)]
    ghost[FINGERPRINT] = (int(pool.digests[block, 1]) & ~1) | reused
    ghost[CLOCK] = int(pool.counts[NUM_ACQUIRED]) & GHOST_CLOCK
    state[FLOW_COLD + reused] += 1
    state[EVICTION_COUNTDOWN] -= 1
    if state[EVICTION_COUNTDOWN] == 0:
        state[EVICTION_COUNTDOWN] = num_usable(pool.records)
        state[FLOW_COLD] = state[FLOW_COLD] // 2 + 1
        state[FLOW_REUSED] = state[FLOW_REUSED] // 2 + 1


@inlined
def _note_drop(pool: PoolArrays, block: int) -> None:
    """Clear the rank of a block that loses its name."""
    if pool.ranks[block] & PROTECTED:
        pool.eviction[NUM_PROTECTED] -= 1
    pool.ranks[block] = 0


def _check(where: str, pool: PoolArrays, cold: list[int], protected: list[int]) -> None:
    """Check that the protected list holds the free protected blocks, and that all protected blocks are named."""
    ranks = pool.ranks
    assert not (ranks[cold] & PROTECTED).any(), f"{where}: a protected block waits in the cold list"
    assert (ranks[protected] & PROTECTED).all(), f"{where}: a cold block waits in the protected list"
    is_protected = (ranks & PROTECTED) != 0
    assert is_protected.sum() == pool.eviction[NUM_PROTECTED], f"{where}: protected blocks miscounted"
    assert not (is_protected & (pool.records[: len(ranks), NAME] == 0)).any(), f"{where}: a protected block has no name"


class AdaptiveArrays(FeaturedArrays):
    """The arrays of a pool with this policy."""

    __slots__ = ()
    policy: ClassVar = PolicyMoments(
        note_name=_recall,
        note_reuse=_protect,
        note_recomputed=_protect,
        enqueue=_enqueue,
        note_eviction=_remember,
        note_drop=_note_drop,
    )


ADAPTIVE: Final = EvictionPolicy("adaptive", AdaptiveArrays, new_state=_new_state, check=_check)
