"""A learning policy: it evicts the content with the fewest expected hits for the memory and time that it occupies.

::

    layout      the arrays: records of blocks, runs, ghosts and classes; memory; the age of a run, and its class
    runs        blocks that were released together, in a ring by time; their ghosts, and their leaves, which may be
                evicted; the content of a simulated LRU cache, and a limit on departures from it
    learning    hits and time at risk by class and age; hit rates of classes, and the value of a run of an age
    policy      the choice of the leaf to evict, and the functions at the moments of a block's life

The policy follows LHD (Beckmann, Chen and Cidon, NSDI 2018), hit density by class and age, but optimises the age at
which content is given up: a Gittins index ("Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41,
1979), used for caches in EVA (Beckmann and Sanchez, HPCA 2017). docs/decisions/0025-a-policy-that-learns.md has the
measurements.
"""
