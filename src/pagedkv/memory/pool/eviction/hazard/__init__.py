"""A policy that learns: it evicts what is expected to hit least, for the room and the time that it takes.

::

    layout      the arrays: what is kept for a block, a run, a ghost and a class; memory
    ages        how old a run is, and in which bin of ages that falls
    ghosts      what was evicted, by a fragment of its digest
    serials     what a block or a ghost keeps of its run
    classes     which runs are alike: features, and three trees of classes
    runs        blocks that were released together, in a ring by time; what is forgotten
    counting    hits and time at risk, by class and age
    learning    hit rates of classes, and what a run of that age is worth; a slice of the work with each request
    leaves      the cached blocks that no cached block continues: what may be evicted
    horizon     what LRU would have cached, and how far it may be departed from
    victims     which of them goes
    policy      the moments of a block's life

An idea of LHD (Beckmann, Chen and Cidon, NSDI 2018), hit density by class and age, with the best age at which to give
up: a Gittins index ("Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979), and in caches EVA
(Beckmann and Sanchez, HPCA 2017). docs/decisions/0025-a-policy-that-learns.md tells what was measured.
"""
