"""Number of blocks that a trace needs: hits against capacity, for LRU and for the offline optimum.

In the order in which data flows::

    references       the references of a trace: paths of prompts in a tree of prefixes; blocks that are used again
    pool_hits        an eviction policy at one capacity, through the production pool; points side by side, in threads;
                     LRU at every capacity at once, and the offline optimum at one capacity, by stack distances
    curve            the whole curve: CapacityCurve; TierCurve: hits of tiers below the pool, by the store core;
                     MemoryNeed: how much memory a trace needs, in words
    model_curve      hits of models of several groups against memory, through the block space: ModelCurve; a curve of a
                     tiny trace, which compiles all loops in advance

The model is a bare cache, so that results are easy to check. Requests arrive one at a time, in file order, and take no
time. Only the block ids of a request's prompt count. Its *hit* is its leading run of resident blocks on arrival. Then
the request holds its blocks (at a capacity of C, at most the first C), while others are evicted to make room: first
those of the least recently used request, and within a request the tail before the head. Then the request releases its
blocks. Every block of a prompt may hit, including the last one.
"""
