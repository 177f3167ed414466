"""Cache events: what became findable and what ceased to be, as arrays.

A router or an outer tier follows them to know which blocks a replica holds. They cost nothing unless
``SpaceConfig.events`` is set.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CacheEventKind", "CacheEvents"]


class CacheEventKind(IntEnum):
    """What happened to a name."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


STORED: Final = int(CacheEventKind.STORED)
REMOVED: Final = int(CacheEventKind.REMOVED)
CLEARED: Final = int(CacheEventKind.CLEARED)


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Events of one pool, oldest first.

    Args:
        pool: name of the pool.
        kinds: int32 ``[n]``, values of :class:`CacheEventKind`.
        groups: int32 ``[n]``; -1 for CLEARED.
        block_ids: int32 ``[n]``; 0 for CLEARED.
        digests: uint8 ``[n, 32]``, the block's digest; zeros for CLEARED.
        parent_digests: uint8 ``[n, 32]``, for STORED the digest of the block before it, if that block is still
            there (in a window it may not be); zeros for a first block and for the other kinds.
    """

    pool: str
    kinds: npt.NDArray[np.int32]
    groups: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]
    parent_digests: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        """Count the events."""
        return len(self.kinds)
