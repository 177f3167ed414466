"""The floor of the space: sequences, batches of rows and steps, over all groups and pools at once.

``block_space`` is the front door, with ``content_space`` under it for what names no sequences: every operation, its
checks and its documentation. Reading order behind them: ``state`` (what there is) and ``steps`` (the open step, and
those in flight), then an operation a module, under the name that it has in :mod:`pagedkv.memory.tables`: ``matching``
and ``hits``, ``admission`` (for the tables' ``first_allocation``), ``drafting``, ``growing``, ``filling``,
``truncating``, ``forking``, ``swapping``, ``holding``, ``loading``, ``withdrawing``, ``releasing``; ``publishing`` and
``merging``; ``pending``, ``declaring``, ``planning``, ``stepping``, ``aborting``. ``observer`` has the moments at which
they call what follows them, ``receipts`` among it. Questions: ``statistics``, ``stored_blocks``, ``kernel_inputs``, and
``audit``, which proves every invariant; ``space_view`` is the part of the door that asks them.
"""

from pagedkv.memory.space.block_space import BlockSpace
from pagedkv.memory.space.checkpoints import Tail
from pagedkv.memory.space.hits import PrefixHit
from pagedkv.memory.space.observed_space import ObservedSpace
from pagedkv.memory.space.observer import SpaceObserver
from pagedkv.memory.space.receipts import Receipt
from pagedkv.memory.space.statistics import PoolStatistics, SpaceStatistics
from pagedkv.memory.space.steps import InFlightStep
from pagedkv.memory.space.stored_blocks import StoredBlock, StoredBlocks

__all__ = [
    "BlockSpace",
    "InFlightStep",
    "ObservedSpace",
    "PoolStatistics",
    "PrefixHit",
    "Receipt",
    "SpaceObserver",
    "SpaceStatistics",
    "StoredBlock",
    "StoredBlocks",
    "Tail",
]
