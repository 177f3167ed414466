"""How many blocks a trace needs: hits against capacity, for LRU and for the offline optimum.

In the order in which data flows::

    block_tree       block ids, each of which names a whole prefix, as one tree
    references       what a trace refers to: the path of each prompt in that tree
    reuses           which blocks are used again: from which request to which
    fenwick_tree     running sums under change, for the two below
    stack_distances  LRU at every capacity at once
    optimum          the offline optimum at one capacity
    side_by_side     points of a curve, measured in threads
    pool_hits        an eviction policy at one capacity, through the production pool
    curve            the whole curve: CapacityCurve
    space_hits       a policy at one capacity, through the block space, for models of several groups
    model_curve      hits of such a model against memory: ModelCurve
    rehearsal        a curve of a tiny trace, so that its loops are compiled in advance

The model is a cache and nothing else, so that results are easy to check. Requests arrive one at a time, in file order,
and take no time. Only the block ids of a request's prompt count. Its *hit* is its leading run of resident blocks on
arrival. Then it holds its blocks (at a capacity of C, at most the first C), while others are evicted to make room:
those of the least recently used request first, and within a request the tail before the head. Then the request releases
them. Every block of a prompt may hit: no last token is kept back to be computed.
"""
