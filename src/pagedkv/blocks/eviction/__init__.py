"""Eviction policies: the order in which cached blocks are evicted, one file or folder for each policy.

Reading order: ``moments`` (the hooks of a policy), ``policy`` (its parts), ``lru`` (the default), ``fifo``,
``adaptive`` and ``hazard`` (the other policies), ``registry`` (the list of all, by name).

CONTRIBUTING lists the steps for adding a policy.
"""
