r"""The order of a snapshot's blocks: every block after its parent, and the blocks of a chain together.

A chain of blocks is one event on the wire, which has the parent of its first block alone. If several blocks have the
same parent, the first of them continues the parent's chain, and each other one begins a chain::

    blocks          a - b - c - d          chains    a b c d
                         \- e - f                    e f

It is computed by NumPy, since a snapshot may have a million blocks: one sort finds the parents, and log2(longest chain)
passes find the depth of every block.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int64Array
from pagedkv.contract.events import StoredBlocks

__all__ = ["in_parent_order"]


def in_parent_order(blocks: StoredBlocks) -> Int64Array:
    """Return the indices of blocks in an order in which each follows its parent, if listed: int64 ``[n]``.

    Cost: O(n log n).
    """
    parents = _parents(blocks)
    count = len(parents)
    has_parent = parents < count
    continues = np.zeros(count, np.bool_)  # the first child of each parent
    children = np.flatnonzero(has_parent)
    _, firsts = np.unique(parents[children], return_index=True)
    continues[children[firsts]] = True
    depths, _ = _distances(parents)
    offsets, heads = _distances(np.where(continues, parents, count))
    return np.lexsort((offsets, heads, depths[heads]))


def _parents(blocks: StoredBlocks) -> Int64Array:
    """Return the index of each block's parent; the number of blocks for a parent that is not listed."""
    count = len(blocks)
    parents = np.full(count, count, np.int64)
    for group in np.unique(blocks.groups).tolist():
        members = np.flatnonzero(blocks.groups == group)
        names, wanted = _leading_words(blocks.digests[members]), _leading_words(blocks.parent_digests[members])
        order = np.argsort(names, kind="stable")
        places = order[np.minimum(np.searchsorted(names[order], wanted), len(members) - 1)]
        found = members[places]
        is_parent = (blocks.digests[found] == blocks.parent_digests[members]).all(axis=1)
        parents[members[is_parent]] = found[is_parent]
    return parents


def _leading_words(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the first 8 of the 32 bytes of each digest, for sorting; callers compare whole digests afterwards."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64).ravel()


def _distances(parents: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distance of each block from the root of its tree, and the root's index, by pointer jumping."""
    count = len(parents)
    roots = np.arange(count)
    distances = (parents < count).astype(np.int64)
    above = np.where(parents < count, parents, roots)
    while True:
        more = distances[above]
        if not more.any():
            return distances, above
        distances = distances + more
        above = above[above]
