"""What the core tells a device: immutable plans, and the other answers of the block space.

A :class:`StepPlan` is everything that one forward pass needs done in memory. Its parts are carried out
in this order, each complete before the next::

    1. swaps_out    device block -> host block      (reads device blocks nobody rewrites in this plan)
    2. swaps_in     host block -> device block
    3. copies       device block -> device block    (no block is both a source and a destination)
    4. table_writes into the device's copy of the block tables
    5. compute      the forward pass writes positions [start, end) of each row into its slots; rows that share
                    a block may write the same keys and values to it twice (a fork before its prompt ran)

All arrays are read-only. Destinations are distinct, so that each part can be one parallel kernel. When step k has
run, the engine says ``acknowledge(k)``; blocks that the plan touches are not handed to anybody else before.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.spec import Row, StepId

__all__ = [
    "AbortedSteps",
    "Allocation",
    "BlockMoves",
    "PrefixHit",
    "Shortage",
    "StepPlan",
    "TableWrites",
    "TokenRanges",
]

Int32Array: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Too few free blocks (nothing was changed).

    Args:
        pool: name of the pool that ran out.
        num_needed: blocks the operation would take from the free blocks.
        num_free: blocks that are free now.
    """

    pool: str
    num_needed: int
    num_free: int

    def __str__(self) -> str:
        """Say it in one line, with the numbers."""
        return f"pool {self.pool!r} has {self.num_free} free blocks, {self.num_needed} are needed"


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """How much of a prompt is cached (a question's answer; it holds until the next change).

    Args:
        num_tokens: leading tokens whose blocks every group can serve; at most ``len(prompt) - 1``.
    """

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A sequence that got its blocks.

    Args:
        row: its row in the tables.
        num_hit_tokens: leading tokens that need not be computed.
    """

    row: Row
    num_hit_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockMoves:
    """Blocks to be copied within one group of equal shape: ``dst_ids[i]`` becomes ``src_ids[i]``.

    Args:
        pool: name of the device pool; swaps move between it and its host pool.
        src_ids: int32 ``[n]``.
        dst_ids: int32 ``[n]``, all different.
    """

    pool: str
    src_ids: Int32Array
    dst_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class TableWrites:
    """New entries of one group's block table, as runs of consecutive logical blocks.

    Run i sets ``table[rows[i], starts[i] : starts[i] + counts[i]]`` to the next ``counts[i]`` of
    ``block_ids``. Entries that fell out of a window are not rewritten: no kernel reads them.

    Args:
        group: index of the group.
        rows: int32 ``[r]``.
        starts: int32 ``[r]``, logical block index of each run.
        counts: int32 ``[r]``, entries of each run.
        block_ids: int32 ``[sum(counts)]``.
    """

    group: int
    rows: Int32Array
    starts: Int32Array
    counts: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class TokenRanges:
    """Positions that a step computes and writes: ``[starts[i], ends[i])`` of ``rows[i]``."""

    rows: Int32Array
    starts: Int32Array
    ends: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """All that one step needs done in memory; see the module's text for the order."""

    step_id: StepId
    swaps_out: tuple[BlockMoves, ...]
    swaps_in: tuple[BlockMoves, ...]
    copies: tuple[BlockMoves, ...]
    table_writes: tuple[TableWrites, ...]
    compute: TokenRanges


@dataclass(frozen=True, slots=True)
class AbortedSteps:
    """What aborting did.

    Args:
        step_ids: the aborted steps: the one named and every later one in flight.
        rewound_rows: rows whose next plan computes the aborted positions again.
        lost_rows: rows whose memory is undefined: free them and allocate their tokens again.
    """

    step_ids: tuple[StepId, ...]
    rewound_rows: tuple[Row, ...]
    lost_rows: tuple[Row, ...]
