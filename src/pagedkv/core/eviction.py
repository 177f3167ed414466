"""The order in which free cached blocks are evicted: the one part of a pool that comes in variants.

A policy is what happens at five moments of a block's life. Everything else (links, counts, names) is the pool's and
the same for all policies::

    note_name      its content got a name: it was computed, and may be hit from now on
    note_reuse     it was hit
    enqueue        nobody uses it any more: into which list, at the back
    note_eviction  its content is given up to make room
    note_drop      its name is taken back for another reason

The next block to be handed out is the first of the cold list, which begins with the blocks without content, and only
when that is empty the first of the protected list::

    cold:       without content | least recently used ... most recently used      <- LRU knows this list alone
    protected:                    least recently used ... most recently used

**lru** keeps all cached blocks in one list, by their last use.

**adaptive** is a segmented LRU (Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance",
IEEE Computer 27(3), 1994) whose protected part finds its size by itself, as in ARC (Megiddo and Modha, FAST 2003). A
block that is hit becomes protected; when protected blocks are more than the target, their least recently used go to
the back of the cold list. A *ghost table* remembers the digests of evicted blocks. Content that comes back soon (after
at most as many acquisitions as there are blocks) is protected from the start, and if it comes back very soon it votes:
had it been evicted without ever a hit, cold lives are too short, and the target falls; had it been hit, it rises. Votes
weigh in inverse proportion to how many blocks of that kind are evicted, so they balance where a block more on either
side is worth the same. docs/decisions/0008-eviction.md tells what was tried, and measured.

Both are *prefix-closed*: no block is evicted while one that continues it is cached. A hit on a block is a hit on all
before it; content is protected at birth only under a protected parent in use; and of one sequence the tail is released
before the head. So of two cached blocks of a chain the later is never behind the earlier in one list, nor in the
protected list while the earlier is in the cold one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from pagedkv.core.blocks import (
    EVICTION_COUNTDOWN,
    EVICTION_FIELDS,
    FLOW_COLD,
    FLOW_REUSED,
    IN_USE,
    LIFE,
    NEXT,
    NULL_BLOCK,
    NUM_ACQUIRED,
    NUM_PROTECTED,
    NUM_SENTINELS,
    PARENT_LIFE,
    PROTECTED,
    QUEUE,
    RANK,
    REUSED,
    TARGET,
    Int32Array,
    Int64Array,
    PoolArrays,
    Uint32Array,
)
from pagedkv.core.compiled import compiled, inlined
from pagedkv.core.free_queue import append, link_before, protected_sentinel, unlink

__all__ = [
    "ADAPTIVE",
    "LRU",
    "POLICIES",
    "EvictionPolicy",
    "enqueue",
    "new_policy_state",
    "note_drop",
    "note_eviction",
    "note_name",
    "note_reuse",
]

FIXED_POINT: Final = 16  # the target counts sixteenths of a block
VOTE: Final = 8  # half a block, before it is weighed
FIRST_TARGET_DIVISOR: Final = 8  # an eighth of the blocks
VOTING_REACH: Final = 4  # who comes back within a quarter of the blocks acquired may vote
GHOSTS_PER_BLOCK: Final = 4  # slots, so that few digests overwrite each other
FEW_GHOSTS: Final = 1 << 4
GHOST_CLOCK: Final = 2**32 - 1
EMPTY: Final = 0  # a clock at which nothing is evicted; when it wraps around, one ghost is lost
GHOST_FIELDS: Final = 2  # the digest's second word with a bit for REUSED, and the clock at its eviction


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """One policy, by name.

    Args:
        name: as in ``SpaceConfig.eviction``.
        has_ghosts: whether evicted content is remembered and blocks are protected; without, all is LRU.
    """

    name: str
    has_ghosts: bool


LRU: Final = EvictionPolicy("lru", has_ghosts=False)
ADAPTIVE: Final = EvictionPolicy("adaptive", has_ghosts=True)
POLICIES: Final[Mapping[str, EvictionPolicy]] = MappingProxyType({policy.name: policy for policy in (LRU, ADAPTIVE)})
"""All policies, the default first."""


def new_policy_state(policy: EvictionPolicy, num_blocks: int) -> tuple[Uint32Array, Int64Array]:
    """Make the state of a policy: its ghost table and its counts, see :class:`~pagedkv.core.blocks.PoolArrays`."""
    state = np.zeros(EVICTION_FIELDS, np.int64)
    if not policy.has_ghosts:
        return np.zeros((0, GHOST_FIELDS), np.uint32), state
    state[TARGET] = num_blocks * FIXED_POINT // FIRST_TARGET_DIVISOR
    state[[FLOW_COLD, FLOW_REUSED]] = 1
    state[EVICTION_COUNTDOWN] = num_blocks
    num_ghosts = max(FEW_GHOSTS, 1 << (GHOSTS_PER_BLOCK * num_blocks - 1).bit_length())
    return np.zeros((num_ghosts, GHOST_FIELDS), np.uint32), state


@inlined
def num_usable(records: Int32Array) -> int:
    """Count the blocks of a pool that can be handed out at all."""
    return len(records) - NUM_SENTINELS - 1


@inlined
def has_ghosts(pool: PoolArrays) -> bool:
    """Tell whether the pool's policy is more than LRU."""
    return len(pool.ghosts) > 0


@inlined
def note_reuse(pool: PoolArrays, block: int) -> None:
    """Protect a block that is hit."""
    if not has_ghosts(pool):
        return
    _protect(pool, block)


@inlined
def _protect(pool: PoolArrays, block: int) -> None:
    if not pool.records[block, RANK] & PROTECTED:
        pool.eviction[NUM_PROTECTED] += 1
    pool.records[block, RANK] = PROTECTED | REUSED


@inlined
def note_name(pool: PoolArrays, block: int, parent: int) -> None:
    """Protect content that was evicted not long ago, if what it continues is protected; let it vote."""
    if has_ghosts(pool):
        _recall(pool, block, parent)


@compiled
def _recall(pool: PoolArrays, block: int, parent: int) -> None:
    records, ghosts, state = pool.records, pool.ghosts, pool.eviction
    if parent != NULL_BLOCK and not _is_protected_in_use(records, block, parent):
        return
    ghost = ghosts[int(pool.digests[block, 0]) & (len(ghosts) - 1)]
    if ghost[1] == EMPTY or (int(ghost[0]) | 1) != (int(pool.digests[block, 1]) | 1):
        return
    num_blocks = num_usable(records)
    away = (int(pool.counts[NUM_ACQUIRED]) - int(ghost[1])) & GHOST_CLOCK
    if away > num_blocks:
        return
    if away * VOTING_REACH <= num_blocks:
        flow = state[FLOW_COLD] + state[FLOW_REUSED]
        if ghost[0] & 1:
            state[TARGET] += VOTE * flow // state[FLOW_REUSED]
        else:
            state[TARGET] -= VOTE * flow // state[FLOW_COLD]
        state[TARGET] = max(0, min(state[TARGET], num_blocks * (FIXED_POINT - 1)))
    ghost[1] = EMPTY
    _protect(pool, block)


@inlined
def _is_protected_in_use(records: Int32Array, block: int, parent: int) -> bool:
    """Tell whether what a block continues is protected, and cannot be evicted before the block is released."""
    is_alive = records[parent, LIFE] == records[block, PARENT_LIFE]
    return bool(is_alive and records[parent, RANK] & PROTECTED and records[parent, QUEUE] == IN_USE)


@inlined
def enqueue(pool: PoolArrays, block: int) -> None:
    """Put a cached block that nobody uses at the back of its list."""
    if not pool.records[block, RANK] & PROTECTED:
        append(pool.records, pool.counts, block)
    else:
        _enqueue_protected(pool, block)


@compiled
def _enqueue_protected(pool: PoolArrays, block: int) -> None:
    """Put a block at the back of the protected list, and demote its least recently used beyond the target."""
    records, state = pool.records, pool.eviction
    append(records, pool.counts, block)
    unlink(records, block)
    sentinel = protected_sentinel(records)
    link_before(records, sentinel, block)
    while state[NUM_PROTECTED] * FIXED_POINT > state[TARGET] and records[sentinel, NEXT] != sentinel:
        oldest = records[sentinel, NEXT]
        unlink(records, oldest)
        link_before(records, NULL_BLOCK, oldest)
        records[oldest, RANK] = REUSED
        state[NUM_PROTECTED] -= 1


@inlined
def note_eviction(pool: PoolArrays, block: int) -> None:
    """Remember content that is evicted, before its name is gone."""
    if has_ghosts(pool):
        _remember(pool, block)


@compiled
def _remember(pool: PoolArrays, block: int) -> None:
    state = pool.eviction
    reused = 1 if pool.records[block, RANK] & REUSED else 0
    ghost = pool.ghosts[int(pool.digests[block, 0]) & (len(pool.ghosts) - 1)]
    ghost[0] = (int(pool.digests[block, 1]) & ~1) | reused
    ghost[1] = int(pool.counts[NUM_ACQUIRED]) & GHOST_CLOCK
    state[FLOW_COLD + reused] += 1
    state[EVICTION_COUNTDOWN] -= 1
    if state[EVICTION_COUNTDOWN] == 0:
        state[EVICTION_COUNTDOWN] = num_usable(pool.records)
        state[FLOW_COLD] = state[FLOW_COLD] // 2 + 1
        state[FLOW_REUSED] = state[FLOW_REUSED] // 2 + 1


@inlined
def note_drop(pool: PoolArrays, block: int) -> None:
    """Forget the rank of a block whose name is gone."""
    if pool.records[block, RANK] & PROTECTED:
        pool.eviction[NUM_PROTECTED] -= 1
    pool.records[block, RANK] = 0
