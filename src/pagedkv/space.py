"""The block space, its answers, and its observers. Public import path of :mod:`pagedkv.memory.space`."""

from pagedkv.memory.space import (
    BlockContents,
    BlockSpace,
    ObservedSpace,
    PoolStatistics,
    PrefixHit,
    Receipt,
    SpaceObserver,
    SpaceStatistics,
    StoredBlock,
    StoredBlocks,
)

__all__ = [
    "BlockContents",
    "BlockSpace",
    "ObservedSpace",
    "PoolStatistics",
    "PrefixHit",
    "Receipt",
    "SpaceObserver",
    "SpaceStatistics",
    "StoredBlock",
    "StoredBlocks",
]
