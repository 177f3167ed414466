"""Number of blocks that a trace needs: hits against capacity, for LRU and for the offline optimum.

In the order in which data flows::

    block_tree       block ids, each of which names a whole prefix, as one tree
    references       the references of a trace: the path of each prompt in that tree
    reuses           blocks that are used again: from which request to which
    fenwick_tree     running sums under change, for the two below
    stack_distances  LRU at every capacity at once
    optimum          the offline optimum at one capacity
    side_by_side     points of a curve, measured in threads
    pool_hits        an eviction policy at one capacity, through the production pool
    tier_hits        hits of tiers below the pool, by the store core: TierCurve
    curve            the whole curve: CapacityCurve
    space_hits       a policy at one capacity, through the block space, for models of several groups
    model_curve      hits of such a model against memory: ModelCurve
    rehearsal        a curve of a tiny trace, which compiles all loops in advance

The model is a bare cache, so that results are easy to check. Requests arrive one at a time, in file order, and take no
time. Only the block ids of a request's prompt count. Its *hit* is its leading run of resident blocks on arrival. Then
the request holds its blocks (at a capacity of C, at most the first C), while others are evicted to make room: first
those of the least recently used request, and within a request the tail before the head. Then the request releases its
blocks. Every block of a prompt may hit, including the last one.
"""
