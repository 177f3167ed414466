"""How many blocks a trace wants: hits against capacity, for LRU and for the offline optimum.

In the order in which data flows::

    block_tree       ids of blocks, each of which names a whole prefix, as one tree
    references       what a trace refers to: the path of each prompt in that tree
    reuses           which blocks are used again: from which request to which
    fenwick_tree     running sums under change, for the two below
    stack_distances  LRU at every capacity at once
    optimum          the offline optimum at one capacity
    side_by_side     points of a curve, measured in threads
    pool_hits        an eviction policy at one capacity, through the production pool
    curve            all of it together: CapacityCurve
    space_hits       a policy at one capacity, through the block space, for models of several groups
    model_curve      hits of such a model against memory: ModelCurve
    rehearsal        a curve of a tiny trace, so that its loops are compiled ahead

The model is a cache and nothing else, so that anyone can check it. Requests come one at a time, in file order, and take
no time. Of a request only the ids of its prompt's blocks count. Its *hit* is its leading run of resident blocks on
arrival. Then it holds its blocks (of a prompt of more than C blocks the first C, at a capacity of C), while
others are evicted to make room: the least recently used request's first, and of one request the tail before the
head. Then it lets go of them. Blocks are counted as the trace refers to them: no token is left over to be computed.
"""
