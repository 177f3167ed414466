"""Eviction policies: the order in which cached blocks are evicted, one file or folder for each policy but LRU.

Reading order: ``policy`` (its parts, and LRU, which needs none of them), ``tlru``, ``rings`` (lists beside the pool's),
``fifo`` and ``priority``, which use them, ``adaptive`` and ``hazard`` (the other policies), ``registry`` (the list of
all, by name).

CONTRIBUTING lists the steps for adding a policy.
"""
