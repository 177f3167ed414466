"""Which cached block goes first: the one part of a pool that comes in variants, a file each.

Reading order: ``moments`` (at which a policy may act), ``policy`` (what a policy is), ``lru`` (what it is by itself),
``fifo``, ``adaptive`` and ``hazard`` (the others), ``registry`` (the list of all, by name).

CONTRIBUTING says all that a further policy takes.
"""
