"""Which cached block goes first: the one part of a pool that comes in variants, a file each.

Reading order: ``policy`` (what a policy is: what it does at five moments of a block's life), ``lru`` (nothing but the
default of each), ``fifo`` and ``adaptive`` (the others), ``registry`` (the list of all, by name), ``hooks`` (the five
moments as the rest of the pool calls them, made from the list).

A further policy is a file here, its line in ``registry`` and a test; nothing else of the package names the policies.
"""
