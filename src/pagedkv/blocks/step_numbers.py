"""The numbers of the open step and of the last settled one. Only this module writes ``OPEN_STEP`` and ``SETTLED_STEP``.

Blocks store steps in 32 bits (:mod:`~pagedkv.blocks.block_record`), so all numbers are lowered from time to time.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_record import lower_steps
from pagedkv.blocks.blocks import OPEN_STEP, SETTLED_STEP, PoolArrays
from pagedkv.compilation.compiled import inlined
from pagedkv.contract.arrays import Int64Array

__all__ = ["begin_numbers", "note_settled", "open_next", "renumber"]


def begin_numbers(counts: Int64Array) -> None:
    """Set the open step to 1."""
    counts[OPEN_STEP] = 1


def open_next(counts: Int64Array) -> None:
    """Open the next step."""
    counts[OPEN_STEP] += 1


@inlined
def note_settled(counts: Int64Array, step: int) -> None:
    """Record that every step up to ``step`` is over."""
    counts[SETTLED_STEP] = step


def renumber(pool: PoolArrays, num_before: int, is_held: npt.NDArray[np.bool_]) -> None:
    """Lower all step numbers by ``num_before``. O(blocks).

    Args:
        is_held: bool ``[records]``, whether a record has a HOLD_STEP.
    """
    lower_steps(pool.records, num_before, is_held)
    pool.counts[[OPEN_STEP, SETTLED_STEP]] -= num_before
