"""LRU: the cached blocks in one list, by the time of their last release.

It needs no state and no hooks: a hit takes a block out of the list, and its release puts it at the back. It is
prefix-closed, since a row that refers to a block refers to all blocks before it, and releases these later.
"""

from typing import Final

from pagedkv.blocks.eviction.policy import EvictionPolicy
from pagedkv.blocks.record import FeaturedArrays

__all__ = ["LRU"]

LRU: Final = EvictionPolicy("lru", FeaturedArrays)
