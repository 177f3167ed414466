"""The leaves: unreferenced cached blocks without unreferenced cached children. These may be evicted.

A block, in use or not, counts its children that are free and cached. It is a leaf while it is free and has none. Where
whole prefixes are kept, a free block has no child in use; the blocks behind a window may be evicted even while their
sequence continues. Only the last cached block of a run can be a leaf, so drawing a leaf means drawing a run.

A leaf's row, in a dense array, contains copies of the fields of its run that determine its value. Runs of free blocks
do not change, so the copies stay right, and reading a drawn leaf touches one cache line instead of three. Every
operation is O(1).
"""

from pagedkv.blocks.eviction.hazard.layout import (
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
from pagedkv.blocks.eviction.hazard.runs import begin_run_aside
from pagedkv.blocks.eviction.hazard.serials import NO_RUN, slot_of
from pagedkv.blocks.record import LIFE, NULL_BLOCK, PARENT, PARENT_LIFE, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined

__all__ = ["join_cached", "leave_cached", "live_parent"]


@inlined
def live_parent(pool: PoolArrays, block: int) -> int:
    """Return the parent of a named block; the null block if the parent's content is gone or there is no parent."""
    parent = pool.records[block, PARENT]
    if pool.records[parent, LIFE] != pool.records[block, PARENT_LIFE]:
        return NULL_BLOCK
    return int(parent)


@inlined
def _num_children(pool: PoolArrays, block: int) -> int:
    """Count the free cached children of a block's current content."""
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
    """Remove a leaf; the last leaf takes its place."""
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
    """Record that a named block is free now."""
    marks = pool.eviction_blocks
    mark = marks[block, RUN]  # behind a window, for example, no end of a sequence gave the block a run
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
    """Record that a block, if it was free and cached, is now in use, evicted, spare, or about to lose its name."""
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
