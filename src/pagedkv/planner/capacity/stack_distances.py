"""LRU at every capacity at once, by stack distances.

Order all blocks by how recently they were used, and those of one request head first. For every C, a cache of C blocks
has the first C of this line (Mattson, Gecsei, Slutz and Traiger, "Evaluation Techniques for Storage Hierarchies", IBM
Systems Journal 9(2), 1970). So a request need not be replayed at each capacity: at capacity C it hits those of its
blocks that are at place C or before. A block's place on arrival is its *stack distance*.

Proof that this holds here too, after a request for the n blocks R:

* The line becomes R, head first, followed by the old line without R.
* If n < C, the cache keeps R and evicts the least recent of its other blocks until C - n are left. They are the first
  C - n of the line without R, since those were among the first C of the old line.
* If n >= C, the cache has the first C blocks of R, and so do the first C places of the line.

The blocks of a prompt at place C or before are a *leading* run of it: a request that used one of them also used all
blocks before it, and moved them to the front, ahead of it.

One row of :class:`~pagedkv.planner.capacity.reuses.Reuses` takes neighbouring places. Later requests moved a head of
the prompt of ``earlier`` to the front. The rest of that prompt has no gaps, and the row's blocks come first in it::

    line    | last used after ``earlier`` | last used by ``earlier``  | last used before |
            |                             | the row's | deeper        |                  |

So each row is one range of distances. The range begins at a sum, over requests, of the blocks last used by each. A
Fenwick tree has those sums; no single block is visited.
"""

import numpy as np

from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.planner.capacity.fenwick_tree import add_weight, new_fenwick_tree, sum_through
from pagedkv.planner.capacity.references import BlockReferences
from pagedkv.planner.capacity.reuses import Reuses

__all__ = ["lru_hits_by_capacity", "lru_hits_by_request"]


def lru_hits_by_capacity(references: BlockReferences) -> Int64Array:
    """Count the hits of LRU at every capacity.

    Returns:
        int64 ``[1 + num_unique_blocks]``, indexed by capacity; never decreasing, the last value ideal. O(blocks + r log
        n) for r rows of reuses of n requests.
    """
    changes = np.zeros(references.num_unique_blocks + 2, np.int64)
    held = new_fenwick_tree(references.num_requests)
    _mark_distances(references.reuses, references.num_blocks, held, changes)
    hits_at_distance = np.cumsum(changes[:-1], out=changes[:-1])  # in place: the array has a number for each block
    return np.cumsum(hits_at_distance, out=hits_at_distance)


def lru_hits_by_request(references: BlockReferences, capacity: int) -> Int64Array:
    """Count the hits of LRU at one capacity, request by request: int64 ``[num_requests]``. O(r log n) as above."""
    hits = np.zeros(references.num_requests, np.int64)
    held = new_fenwick_tree(references.num_requests)
    _count_within(references.reuses, references.num_blocks, held, capacity, hits)
    return hits


@compiled
def _mark_distances(reuses: Reuses, num_blocks: Int32Array, held: Int64Array, changes: Int64Array) -> None:
    """Add up the ranges of distances: +1 where a range begins, -1 after its end.

    ``held`` is the Fenwick tree of the blocks last used by each request.
    """
    num_blocks_used = 0
    row = 0
    for request in range(len(num_blocks)):
        first_row = row
        while row < len(reuses.later) and reuses.later[row] == request:
            num_more_recent = num_blocks_used - sum_through(held, reuses.earlier[row])
            changes[num_more_recent + 1] += 1
            changes[num_more_recent + 1 + reuses.num_blocks[row]] -= 1
            row += 1
        num_blocks_used += _move_to_front(reuses, first_row, row, held, request, num_blocks[request])


@compiled
def _count_within(reuses: Reuses, num_blocks: Int32Array, held: Int64Array, capacity: int, hits: Int64Array) -> None:
    """Add up, for each request, the blocks within a capacity. Arguments as in :func:`_mark_distances`."""
    num_blocks_used = 0
    row = 0
    for request in range(len(num_blocks)):
        first_row = row
        while row < len(reuses.later) and reuses.later[row] == request:
            num_more_recent = num_blocks_used - sum_through(held, reuses.earlier[row])
            hits[request] += min(max(capacity - num_more_recent, 0), reuses.num_blocks[row])
            row += 1
        num_blocks_used += _move_to_front(reuses, first_row, row, held, request, num_blocks[request])


@inlined
def _move_to_front(  # noqa: PLR0913, PLR0917 - a compiled loop takes arrays and numbers separately
    reuses: Reuses, first_row: int, stop_row: int, held: Int64Array, request: int, num_blocks: int
) -> int:
    """Move the reused blocks from their last users' counts to the request's; return how many blocks are new."""
    num_new = num_blocks
    for row in range(first_row, stop_row):
        add_weight(held, reuses.earlier[row], -reuses.num_blocks[row])
        num_new -= reuses.num_blocks[row]
    add_weight(held, request, num_blocks)
    return num_new
