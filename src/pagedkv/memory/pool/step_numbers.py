"""The numbers of steps: which one is open, and up to which all are over. Owns ``OPEN_STEP`` and ``SETTLED_STEP``.

Blocks note steps in 32 bits (:mod:`~pagedkv.memory.pool.block_record`), so that numbers begin anew now and then.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.contract.arrays import Int64Array
from pagedkv.memory.pool.block_record import lower_steps
from pagedkv.memory.pool.blocks import OPEN_STEP, SETTLED_STEP, PoolArrays

__all__ = ["begin_numbers", "note_settled", "open_next", "renumber"]


def begin_numbers(counts: Int64Array) -> None:
    """Begin with step 1."""
    counts[OPEN_STEP] = 1


def open_next(counts: Int64Array) -> None:
    """Begin the next step."""
    counts[OPEN_STEP] += 1


@inlined
def note_settled(counts: Int64Array, step: int) -> None:
    """Note that every step up to ``step`` is over."""
    counts[SETTLED_STEP] = step


def renumber(pool: PoolArrays, num_before: int, is_held: npt.NDArray[np.bool_]) -> None:
    """Count steps from ``num_before`` on. O(blocks).

    Args:
        is_held: bool ``[records]``, whether a record notes a step as its hold.
    """
    lower_steps(pool.records, num_before, is_held)
    pool.counts[[OPEN_STEP, SETTLED_STEP]] -= num_before
