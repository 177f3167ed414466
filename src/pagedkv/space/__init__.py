"""Block spaces: sequences, batches of rows and steps, over all groups and pools at once.

``block_space`` is the public class: every operation with its checks and its documentation. Behind it are ``state``
(all arrays, and how many blocks are free for whom), ``rows`` (the record of a row) and ``steps`` (the open step, and
those in flight). Then comes one file for each operation, its rule and its compiled loops: ``hits``, ``matching``,
``admission``, ``growing``, ``filling``, ``drafting``, ``truncating``, ``forking``, ``swapping``, ``loading``,
``withdrawing``, ``releasing``, ``forgetting``, ``publishing``, ``declaring``, ``planning``, ``resizing``. They call by
name what only some spaces have: ``tenants``, ``epochs``, ``windows``, ``states``, ``drafting``,
``partial_hits``, ``replaying``. Observers (``observer``) are called, and change nothing: ``receipts``,
``explaining``, ``inspection``. Queries are in ``statistics``, ``stored_blocks`` and ``audit``, which proves every
invariant.
"""

from pagedkv.contract.answers import BlockContents, Receipt, StoredBlocks
from pagedkv.space.block_space import BlockSpace
from pagedkv.space.hits import PrefixHit, Tail
from pagedkv.space.inspection import (
    BlockDetails,
    BlockState,
    CachedPrefixes,
    PoolCounts,
    PoolMap,
    SpaceInspection,
)
from pagedkv.space.observer import SpaceObserver
from pagedkv.space.space_view import ObservedSpace
from pagedkv.space.statistics import PoolStatistics, SpaceStatistics
from pagedkv.space.steps import InFlightStep
from pagedkv.space.stored_blocks import StoredBlock

__all__ = [
    "BlockContents",
    "BlockDetails",
    "BlockSpace",
    "BlockState",
    "CachedPrefixes",
    "InFlightStep",
    "ObservedSpace",
    "PoolCounts",
    "PoolMap",
    "PoolStatistics",
    "PrefixHit",
    "Receipt",
    "SpaceInspection",
    "SpaceObserver",
    "SpaceStatistics",
    "StoredBlock",
    "StoredBlocks",
    "Tail",
]
