"""The leaves: cached blocks that nobody uses and that no such block continues. What may be evicted, in a dense array.

A block counts those who continue it, in use or not; it is a leaf while it is free and counts none. Where whole prefixes
are kept nobody holds what continues a free block; behind a window what is left may go although its sequence goes on. Of
a run only the last cached block can be a leaf, so leaves are drawn where runs are meant.

A leaf's row holds what its worth follows from, copied from its run when it became one: no run of a free block changes,
and whoever draws it waits for one cache line and not for three. Every operation is O(1).
"""

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.pool.blocks import LIFE, NULL_BLOCK, PARENT, PARENT_LIFE, PoolArrays
from pagedkv.memory.pool.eviction.hazard.layout import (
    ABSENT,
    CLASSES,
    COUNTED_LIFE,
    INNER,
    LEAF,
    LEAF_CLASSES,
    LEAF_REFS,
    LEAF_TICKS,
    NO_CLASSES,
    NUM_CHILDREN,
    NUM_LEAVES,
    PLACE,
    REFS,
    RUN,
    TICKS,
)
from pagedkv.memory.pool.eviction.hazard.runs import begin_run_aside
from pagedkv.memory.pool.eviction.hazard.serials import NO_RUN, slot_of

__all__ = ["join_cached", "leave_cached", "live_parent"]


@inlined
def live_parent(pool: PoolArrays, block: int) -> int:
    """Name the block that a named block continues; the null block if it is gone, or there is none."""
    parent = pool.records[block, PARENT]
    if pool.records[parent, LIFE] != pool.records[block, PARENT_LIFE]:
        return NULL_BLOCK
    return int(parent)


@inlined
def _num_children(pool: PoolArrays, block: int) -> int:
    """Count the free cached blocks that continue what a block holds now."""
    marks = pool.eviction_blocks
    return int(marks[block, NUM_CHILDREN]) if marks[block, COUNTED_LIFE] == pool.records[block, LIFE] else 0


@inlined
def _count_children(pool: PoolArrays, block: int, num_children: int) -> None:
    pool.eviction_blocks[block, NUM_CHILDREN] = num_children
    pool.eviction_blocks[block, COUNTED_LIFE] = pool.records[block, LIFE]


@inlined
def _add_leaf(pool: PoolArrays, block: int) -> None:
    marks, runs, state = pool.eviction_blocks, pool.eviction_runs, pool.eviction
    state[NUM_LEAVES] += 1
    place = state[NUM_LEAVES]
    marks[block, PLACE] = place
    marks[place, LEAF] = block
    slot = slot_of(state, len(runs), marks[block, RUN])
    if slot == NO_RUN:
        marks[place, LEAF_CLASSES] = NO_CLASSES
        return
    marks[place, LEAF_TICKS] = runs[slot, TICKS]
    marks[place, LEAF_REFS] = runs[slot, REFS]
    marks[place, LEAF_CLASSES] = runs[slot, CLASSES]


@inlined
def _take_leaf(pool: PoolArrays, block: int, now_is: int) -> None:
    """Take a leaf out; the last one takes its place."""
    marks, state = pool.eviction_blocks, pool.eviction
    place = marks[block, PLACE]
    last = state[NUM_LEAVES]
    marks[marks[last, LEAF], PLACE] = place
    for field in (LEAF, LEAF_TICKS, LEAF_REFS, LEAF_CLASSES):
        marks[place, field] = marks[last, field]
    marks[block, PLACE] = now_is
    state[NUM_LEAVES] -= 1


@compiled
def join_cached(pool: PoolArrays, block: int) -> None:
    """Note that a named block is free now."""
    marks = pool.eviction_blocks
    mark = marks[block, RUN]  # behind a window, for example, nobody said that its sequence ends
    if mark <= 0 or slot_of(pool.eviction, len(pool.eviction_runs), mark) == NO_RUN:
        begin_run_aside(pool, block)
    if _num_children(pool, block):
        marks[block, PLACE] = INNER
    else:
        _add_leaf(pool, block)
    parent = live_parent(pool, block)
    if parent != NULL_BLOCK:
        _count_children(pool, parent, _num_children(pool, parent) + 1)
        if marks[parent, PLACE] > 0:
            _take_leaf(pool, parent, INNER)


@inlined
def leave_cached(pool: PoolArrays, block: int) -> None:
    """Note that a block, if it was free and cached until now, is in use, evicted, spare, or about to lose its name."""
    if pool.eviction_blocks[block, PLACE] != ABSENT:
        _leave_cached(pool, block)


@compiled
def _leave_cached(pool: PoolArrays, block: int) -> None:
    marks = pool.eviction_blocks
    if marks[block, PLACE] > 0:
        _take_leaf(pool, block, ABSENT)
    marks[block, PLACE] = ABSENT
    parent = live_parent(pool, block)
    if parent != NULL_BLOCK:
        num_children = _num_children(pool, parent) - 1
        _count_children(pool, parent, num_children)
        if num_children == 0 and marks[parent, PLACE] == INNER:
            _add_leaf(pool, parent)
