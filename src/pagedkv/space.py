"""The space, what it answers, and what may follow it. A door: the room is :mod:`pagedkv.memory.space`."""

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
