"""A learning policy: it evicts the content with the fewest expected hits for the memory and time that it occupies.

::

    layout      the arrays: records of blocks, runs, ghosts and classes; memory
    ages        the age of a run, and its bin
    ghosts      evicted blocks, by a fragment of the digest
    serials     the serial number of a run in the records of its blocks and ghosts
    classes     the features of a run, and three trees of classes
    runs        blocks that were released together, in a ring by time; their removal
    counting    hits and time at risk, by class and age
    learning    hit rates of classes, and the value of a run of an age; part of the work is done at each request
    leaves      the cached blocks without cached children, which may be evicted
    horizon     the content of a simulated LRU cache, and a limit on departures from it
    victims     the choice of the leaf to evict
    policy      the functions at the moments of a block's life

The policy follows LHD (Beckmann, Chen and Cidon, NSDI 2018), hit density by class and age, but optimises the age at
which content is given up: a Gittins index ("Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41,
1979), used for caches in EVA (Beckmann and Sanchez, HPCA 2017). docs/decisions/0025-a-policy-that-learns.md has the
measurements.
"""
