"""Bounds: limits on the number of unreferenced cached blocks of a group.

States are large, and each serves few prompts, so their number can be limited by group. The cached blocks of a limited
group form a list beside the free queue, in the order in which they became cached. When they exceed the limit, the least
valuable one loses its name. The value is the reason for which a block is kept (``KEPT``); among equals the oldest
goes first::

    lost first:  spare (inside a prompt) | at an interval | before an end | before a junction | kept by a feature

The links of a block are in its row of ``PoolArrays.bounds``. After the rows of the blocks there is one for each name,
with the ends of its list, its length and its limit. Only names are limited: a block that lost its name stays free.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.free_queue import is_leased
from pagedkv.blocks.record import FREE, KEPT, NAME, NUM_SENTINELS, QUEUE, PoolArrays
from pagedkv.compilation.compiled import compiled, featured, inlined
from pagedkv.contract.arrays import Int32Array, Uint8Array

# Columns of ``bounds``, for a block and for a name.
AFTER: Final = 0
BEFORE: Final = 1
NUM_BOUNDED: Final = 2
MOST: Final = 3
NUM_COLUMNS: Final = 4


def new_bounds(num_blocks: int, most_by_name: dict[int, int]) -> Int32Array:
    """Make the empty lists for the limits by name; an empty array if there are none."""
    if not most_by_name:
        return np.zeros((0, NUM_COLUMNS), np.int32)
    bounds = np.zeros((num_blocks + 1 + max(most_by_name), NUM_COLUMNS), np.int32)
    for name, most in most_by_name.items():
        bounds[num_blocks + name] = num_blocks + name, num_blocks + name, 0, most
    return bounds


@inlined
def row_of_name(pool: PoolArrays, block: int) -> int:
    """Return the row of a block's name; 0 if that name has no limit."""
    row = len(pool.records) - NUM_SENTINELS + pool.records[block, NAME]
    return row if row < len(pool.bounds) and pool.bounds[row, MOST] else 0


@compiled
def stand(pool: PoolArrays, block: int) -> bool:
    """Append a block that has become cached to the list of its name; return whether the list exceeds its limit."""
    row = row_of_name(pool, block)
    if row == 0:
        return False
    bounds = pool.bounds
    last = bounds[row, BEFORE]
    bounds[block, AFTER], bounds[block, BEFORE] = row, last
    bounds[last, AFTER] = bounds[row, BEFORE] = block
    bounds[row, NUM_BOUNDED] += 1
    return bool(bounds[row, NUM_BOUNDED] > bounds[row, MOST])


@featured
@compiled
def leave(pool: PoolArrays, block: int) -> None:
    """Remove a block that is no longer cached from its list, while it still has its name."""
    row = row_of_name(pool, block)
    if row == 0:
        return
    bounds = pool.bounds
    bounds[bounds[block, BEFORE], AFTER] = bounds[block, AFTER]
    bounds[bounds[block, AFTER], BEFORE] = bounds[block, BEFORE]
    bounds[row, NUM_BOUNDED] -= 1


@compiled
def least_valuable(pool: PoolArrays, block: int) -> int:
    """Find the least valuable cached block with the same name as a block. O(blocks with the name)."""
    row = row_of_name(pool, block)
    least = pool.bounds[row, AFTER]
    other = pool.bounds[least, AFTER]
    while other != row:
        if _worth(pool, other) < _worth(pool, least):
            least = other
        other = pool.bounds[other, AFTER]
    return int(least)


@inlined
def _worth(pool: PoolArrays, block: int) -> int:
    """Return the value of a cached block: spare, then at intervals, before ends, before junctions, then leased."""
    return 2**30 if is_leased(pool, block) else int(pool.records[block, KEPT])


@compiled
def first_unbounded(pool: PoolArrays, is_linked: Uint8Array) -> int:
    """Find a block that is wrongly in or not in a list, or the row of a list that is wrong; 0 if all is consistent.

    For ``check()``. O(blocks).

    Args:
        is_linked: uint8, zeros, one for each row of the bounds.
    """
    num_blocks = len(pool.records) - NUM_SENTINELS
    for row in range(num_blocks, len(pool.bounds)):
        if pool.bounds[row, MOST] == 0:
            continue
        num_linked = 0
        block = pool.bounds[row, AFTER]
        while block != row and num_linked <= pool.bounds[row, NUM_BOUNDED]:
            if row_of_name(pool, block) != row or pool.bounds[pool.bounds[block, AFTER], BEFORE] != block:
                return row
            is_linked[block] = 1
            num_linked += 1
            block = pool.bounds[block, AFTER]
        if num_linked != pool.bounds[row, NUM_BOUNDED] or num_linked > pool.bounds[row, MOST]:
            return row
    for block in range(1, min(num_blocks, len(pool.bounds))):
        is_cached = pool.records[block, QUEUE] == FREE and pool.records[block, NAME] and row_of_name(pool, block)
        if bool(is_cached) != bool(is_linked[block]):
            return block
    return 0
