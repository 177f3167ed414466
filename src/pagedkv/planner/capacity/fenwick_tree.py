"""A Fenwick tree: prefix sums of changing weights, in compiled loops.

Peter Fenwick, "A New Data Structure for Cumulative Frequency Tables", Software: Practice and Experience 24(3), 1994.
Place i of the tree has the sum of ``i & -i`` weights (the lowest set bit of i), the last of which is number i - 1.
"""

import numpy as np

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int64Array

__all__ = ["add_weight", "find_unit", "new_fenwick_tree", "sum_through"]


def new_fenwick_tree(num_weights: int) -> Int64Array:
    """Make a tree of ``num_weights`` zeros: int64 ``[1 + num_weights]``."""
    return np.zeros(1 + num_weights, np.int64)


@compiled
def add_weight(tree: Int64Array, index: int, weight: int) -> None:
    """Add to one weight. O(log n)."""
    place = index + 1
    while place < len(tree):
        tree[place] += weight
        place += place & -place


@compiled
def sum_through(tree: Int64Array, index: int) -> int:
    """Sum the weights from 0 through ``index``. O(log n)."""
    place = index + 1
    total = 0
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


@compiled
def find_unit(tree: Int64Array, unit: int) -> int:
    """Find the first index at which the prefix sum of the weights, none negative, reaches ``unit`` >= 1. O(log n)."""
    step = 1
    while 2 * step < len(tree):
        step *= 2
    place = 0
    left = unit
    while step > 0:
        if place + step < len(tree) and tree[place + step] < left:
            place += step
            left -= tree[place]
        step //= 2
    return place
