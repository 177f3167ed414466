"""Cache events: which blocks were named and which lost their names, as arrays.

Routers and outer cache tiers read them to know which blocks a replica has cached. They cost nothing unless
``SpaceConfig.events`` is set.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CacheEventKind", "CacheEvents"]


class CacheEventKind(IntEnum):
    """What happened to a block's name."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3
    GAP = 4


STORED: Final = int(CacheEventKind.STORED)
REMOVED: Final = int(CacheEventKind.REMOVED)
CLEARED: Final = int(CacheEventKind.CLEARED)
GAP: Final = int(CacheEventKind.GAP)


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Events of one pool, oldest first.

    Beyond ``SpaceConfig.max_events`` the oldest events are lost, and a GAP comes first. A reader of a GAP must discard
    its record of the pool, since it has missed changes, and list all names anew with :meth:`BlockSpace.stored_blocks
    <pagedkv.BlockSpace.stored_blocks>`.

    Args:
        pool: name of the pool.
        kinds: int32 ``[n]``, values of :class:`CacheEventKind`.
        groups: int32 ``[n]``; -1 for CLEARED and GAP.
        block_ids: int32 ``[n]``; 0 for CLEARED, and for GAP the number of lost events.
        digests: uint8 ``[n, 32]``, the block's digest; zeros for CLEARED and GAP.
        parent_digests: uint8 ``[n, 32]``, for STORED the digest of the block before it (which may not be cached any
            more); zeros for a first block and for the other kinds.
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
