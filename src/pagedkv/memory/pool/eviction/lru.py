"""LRU: the cached blocks in one list, by when they were last released.

It needs no state and nothing noted: a hit takes a block out of the list, and its release puts it at the back. It is
prefix-closed, as whoever holds a block holds all before it, and releases these later.
"""

from typing import Final

from pagedkv.memory.pool.eviction.policy import EvictionPolicy
from pagedkv.memory.pool.features import FeaturedArrays

__all__ = ["LRU"]

LRU: Final = EvictionPolicy("lru", FeaturedArrays)
