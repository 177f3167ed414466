"""Block spaces: sequences, batches of rows and steps, over all groups and pools at once.

``block_space`` is the public entry point: every operation with its checks and its documentation. Of its base classes
``step_space`` has those on steps, ``swap_space`` swapping, ``content_space`` the operations that take no sequences,
``optional_methods`` what features offer, and ``space_view`` the read access. Reading order behind them: ``state`` (all
arrays), ``shortage`` (free blocks) and ``steps`` (the open step, and those in flight). Then comes one module for each
operation, named as in :mod:`pagedkv.tables`: ``matching`` and ``hits``, ``admission`` (there
``first_allocation``), ``drafting``, ``growing``, ``filling``, ``truncating``, ``forking``, ``swapping``, ``holding``,
``loading``, ``withdrawing``, ``releasing``; ``publishing`` and ``merging``; ``pending``, ``declaring``, ``planning``,
``stepping``, ``aborting``. ``feature`` has the moments at which optional features take part in operations, and
``features`` makes those of a configuration: ``tenants``, ``epochs``, ``leasing``, ``retaining``, ``states``,
``continuing``, ``draft_states``, ``replaying`` and the passes of ``matching`` that are on. ``observer`` has the moments
at which observers are called, ``receipts`` and ``inspection`` among them. Queries are in ``statistics``,
``stored_blocks``, ``kernel_inputs``, and ``audit``, which proves every invariant.
"""

from pagedkv.contract.events import BlockContents, StoredBlocks
from pagedkv.contract.receipt import Receipt
from pagedkv.space.block_space import BlockSpace
from pagedkv.space.hits import PrefixHit
from pagedkv.space.inspection import (
    BlockDetails,
    BlockState,
    CachedPrefixes,
    PoolCounts,
    PoolMap,
    SpaceInspection,
)
from pagedkv.space.observed_space import ObservedSpace
from pagedkv.space.observer import SpaceObserver
from pagedkv.space.statistics import PoolStatistics, SpaceStatistics
from pagedkv.space.steps import InFlightStep
from pagedkv.space.stored_blocks import StoredBlock
from pagedkv.space.tails import Tail

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
