"""The offline optimum: the most hits that a policy with knowledge of the whole trace could have.

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
:class:`~pagedkv.planner.capacity.reuses.Reuses` adds to the count of its later request. Eviction lowers the count of
the furthest request that has one. The count that remains when a request arrives is its number of hits. No single block
is visited.
"""

import numpy as np

from pagedkv.compilation.compiled import compiled_aside
from pagedkv.contract.arrays import Int64Array
from pagedkv.planner.capacity.fenwick_tree import add_weight, find_unit, new_fenwick_tree
from pagedkv.planner.capacity.references import BlockReferences
from pagedkv.planner.capacity.reuses import Reuses
from pagedkv.planner.capacity.side_by_side import Pause, go_on

__all__ = ["optimal_hits", "optimal_hits_by_request"]


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
