"""Cache events: which blocks were named and which lost their names, as arrays; and lists of all named blocks.

Routers and outer cache tiers read them to know which blocks a replica has cached. They cost nothing unless
``SpaceConfig.events`` is set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array

__all__ = ["BlockContents", "CacheEventKind", "CacheEvents", "StoredBlocks", "TierEvents"]


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


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """All blocks of one pool that are in the prefix index, in the order of their ids.

    Args:
        pool: name of the pool.
        groups: int32 ``[n]``, the group of each; block_ids: int32 ``[n]``.
        digests: uint8 ``[n, 32]``.
        parent_digests: uint8 ``[n, 32]``, as in :class:`~pagedkv.CacheEvents`; zeros for a first block, and if the
            parent is not known any more.
        is_parent_known: bool ``[n]``, false if the parent is not known any more.
    """

    pool: str
    groups: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]
    parent_digests: npt.NDArray[np.uint8]
    is_parent_known: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.block_ids)


@dataclass(frozen=True, slots=True, eq=False)
class TierEvents:
    """Events of the entries of one medium below device memory, oldest first; or all its entries, as stored ones.

    An entry holds a *run* of blocks, and its key is the digest of the last one; or an *end*, and its key is derived
    from the digest of the last block (:mod:`pagedkv.tiers.identity`). Keys have no epoch.

    Args:
        medium: name of the medium, as it is published: "CPU", "FOLDER", "REDIS", ...
        run_tokens: tokens of a run; 0 if the model's entries are ends alone.
        kinds: int32 ``[n]``, STORED or REMOVED.
        keys: uint8 ``[n, 32]``.
    """

    medium: str
    run_tokens: int
    kinds: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        """Count the events."""
        return len(self.kinds)


@dataclass(frozen=True, slots=True, eq=False)
class BlockContents:
    """What blocks of one pool hold, block by block.

    Args:
        token_ids: int32 ``[n, block size of the pool]``; only the first ``num_tokens`` of each row count.
        num_tokens: int32 ``[n]``, the tokens of each block: fewer than the block size for a state that is kept inside
            an interval, 0 for a block that is not cached any more.
        extra_keys: encoded extra keys by index, of the blocks that have any.
    """

    token_ids: Int32Array
    num_tokens: Int32Array
    extra_keys: Mapping[int, bytes]

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.num_tokens)
