"""Hits of LRU and of the optimum at every capacity, without a simulation of the cache.

A Fenwick tree: prefix sums of changing weights, in compiled loops.

Peter Fenwick, "A New Data Structure for Cumulative Frequency Tables", Software: Practice and Experience 24(3), 1994.
Place i of the tree has the sum of ``i & -i`` weights (the lowest set bit of i), the last of which is number i - 1.

LRU at every capacity at once, by stack distances.

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

One row of :class:`~pagedkv.planner.capacity.references.Reuses` takes neighbouring places. Later requests moved a head
of the prompt of ``earlier`` to the front. The rest of that prompt has no gaps, and the row's blocks come first in it::

    line    | last used after ``earlier`` | last used by ``earlier``  | last used before |
            |                             | the row's | deeper        |                  |

So each row is one range of distances. The range begins at a sum, over requests, of the blocks last used by each. A
Fenwick tree has those sums; no single block is visited.

The offline optimum: the most hits that a policy with knowledge of the whole trace could have.

It is Belady's MIN ("A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal 5(2), 1966)
with bypass. After each request the cache keeps at most C of its blocks and the request's: those whose next use comes
first, and among equal next uses those nearer to the head. Blocks that are never used again are dropped.

*What it bounds.* The optimum may keep any C of the cached blocks and the request's blocks; it may drop the request's
own (bypass). A policy that must hold the blocks of each request, at most the first C, is one of its choices, so that
policy has no more hits. Possibly no policy has as many: at capacity 1 the prompts ``a``, ``b``, ``a`` hit once with
bypass, and never without.

*Why it is optimal.* Keeping a block from one use to the next is an interval of requests, and at most C intervals may
overlap. The number of kept intervals is greatest if, whenever there are too many, those that end last are dropped
(Faigle and Nawijn, "Note on scheduling intervals on-line", Discrete Applied Mathematics 58, 1995). So no policy has
more blocks resident at their next use, let alone in leading runs. Here the kept blocks *are* leading runs: the block
before a kept one is used next no later than that one, and is nearer to the head.

*How it is computed.* The blocks kept for one next request are a leading run of it, so their count suffices. A row of
:class:`~pagedkv.planner.capacity.references.Reuses` adds to the count of its later request. Eviction lowers the count
of the furthest request that has one. The count that remains when a request arrives is its number of hits. No single
block is visited.
"""

import numpy as np

from pagedkv.compilation.compiled import compiled, compiled_aside, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.planner.capacity.pool_hits import Pause, go_on
from pagedkv.planner.capacity.references import BlockReferences, Reuses

__all__ = [
    "add_weight",
    "find_unit",
    "lru_hits_by_capacity",
    "lru_hits_by_request",
    "new_fenwick_tree",
    "optimal_hits",
    "optimal_hits_by_request",
    "sum_through",
]


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


def optimal_hits(references: BlockReferences, capacity: int, pause: Pause = go_on) -> int:
    """Count the hits of the optimum. O(r log n) for r rows of reuses of n requests.

    Args:
        references: the trace.
        capacity: blocks of the cache, at least 1.
        pause: called before counting begins; its exception ends the count.
    """
    return int(optimal_hits_by_request(references, capacity, pause).sum())


def optimal_hits_by_request(references: BlockReferences, capacity: int, pause: Pause = go_on) -> Int64Array:
    """Count as :func:`optimal_hits` does, request by request: int64 ``[num_requests]``."""
    pause()
    order = np.argsort(references.reuses.earlier, kind="stable")
    earlier, later, num_blocks = references.reuses
    rows = Reuses(earlier[order], later[order], num_blocks[order])
    num_kept = np.zeros(references.num_requests, np.int64)
    num_usable = min(capacity, references.num_unique_blocks)
    _serve_all(rows, num_usable, num_kept, new_fenwick_tree(references.num_requests))
    return num_kept


@compiled_aside
def _serve_all(rows: Reuses, capacity: int, num_kept: Int64Array, kept: Int64Array) -> None:
    """Serve all requests. ``num_kept``: blocks kept for each request, finally its hits; ``kept``: the Fenwick tree."""
    num_resident = 0
    row = 0
    for request in range(len(num_kept)):
        num_resident -= num_kept[request]
        add_weight(kept, request, -num_kept[request])
        while row < len(rows.earlier) and rows.earlier[row] == request:
            num_kept[rows.later[row]] += rows.num_blocks[row]
            add_weight(kept, rows.later[row], rows.num_blocks[row])
            num_resident += rows.num_blocks[row]
            row += 1
        while num_resident > capacity:
            furthest = find_unit(kept, num_resident)
            num_evicted = min(num_kept[furthest], num_resident - capacity)
            num_kept[furthest] -= num_evicted
            add_weight(kept, furthest, -num_evicted)
            num_resident -= num_evicted
