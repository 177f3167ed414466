"""Changes of a cache since the last step, which the engine's thread passes to a publisher.

The engine's thread only copies arrays. All work for each block is done by the publisher's thread
(:mod:`pagedkv.wire.encoding`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pagedkv.contract.events import GAP, BlockContents, CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.space_config import SpaceConfig

__all__ = ["CacheSnapshot", "CachedSpace", "ChangedPool", "Changes", "ListedPool", "changes_of", "listed_pools"]


class CachedSpace(Protocol):
    """The methods of :class:`~pagedkv.BlockSpace` that this module calls; documented there."""

    @property
    def config(self) -> SpaceConfig: ...  # noqa: D102 - see above

    def contents_of(self, blocks: CacheEvents | StoredBlocks) -> BlockContents: ...  # noqa: D102

    def drain_events(self) -> tuple[CacheEvents, ...]: ...  # noqa: D102

    def stored_blocks(self, pool: str | None = None) -> StoredBlocks: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)
class ChangedPool:
    """Events of one pool, and the contents of its stored blocks."""

    events: CacheEvents
    contents: BlockContents


@dataclass(frozen=True, slots=True, eq=False)
class ListedPool:
    """All cached blocks of one pool, and their contents."""

    blocks: StoredBlocks
    contents: BlockContents


Changes: TypeAlias = tuple[ChangedPool | ListedPool | TierEvents, ...]
"""Events of pools; or all blocks of all pools, which replace all blocks that were sent before. And events of tiers."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """All cached blocks at one moment between two batches.

    Args:
        next_batch: number of the first batch whose events the snapshot does not contain.
        pools: the blocks of each pool.
        tiers: the entries of each medium below device memory.
    """

    next_batch: int
    pools: tuple[ListedPool, ...]
    tiers: tuple[TierEvents, ...] = ()


def changes_of(space: CachedSpace, events: Sequence[CacheEvents], tiers: Sequence[TierEvents] = ()) -> Changes:
    """Copy the contents of stored blocks. Changes nothing.

    If the space's log of events was too short (GAP), the result lists all blocks instead, so that consumers are
    complete again.

    Args:
        space: the space from which the events were drained.
        events: events of each pool, from :meth:`BlockSpace.drain_events <pagedkv.BlockSpace.drain_events>`; the space
            must not have changed since.
        tiers: events of each medium below device memory.

    Cost: O(events x block size); after a GAP O(blocks x block size).
    """
    if any((each.kinds == GAP).any() for each in events):
        return (*listed_pools(space), *tiers)
    return (*(ChangedPool(each, space.contents_of(each)) for each in events if len(each)), *tiers)


def listed_pools(space: CachedSpace) -> tuple[ListedPool, ...]:
    """Copy all cached blocks of all pools. Changes nothing. O(blocks x block size)."""
    listed = [space.stored_blocks(pool) for pool in space.config.pool_names]
    return tuple(ListedPool(blocks, space.contents_of(blocks)) for blocks in listed)
