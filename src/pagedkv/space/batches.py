"""Batches of rows as callers bring them: checked, with an error that names the row and its state."""

from collections.abc import Sequence
from typing import Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.core.blocks import Int32Array
from pagedkv.core.rows import LOST, LOST_ON_HOST, RUNNING, STATUS, SWAPPED, VACANT
from pagedkv.errors import (
    FreedSequenceError,
    LostSequenceError,
    SequenceError,
    StepError,
    SwappedOutError,
    UnknownSequenceError,
)
from pagedkv.numbers import as_count
from pagedkv.plan import StepPlan
from pagedkv.space.state import SpaceState
from pagedkv.spec import StepId

__all__ = ["Rows", "as_batch", "as_row", "as_step_id", "require_status"]

Rows: TypeAlias = int | Sequence[int] | npt.NDArray[np.integer]
INT32: Final = np.dtype(np.int32)


def as_batch(rows: Rows) -> Int32Array:
    """Turn one row, a list of rows or an array of rows into an int32 array."""
    if isinstance(rows, np.ndarray) and rows.dtype == INT32 and rows.ndim == 1:
        return np.ascontiguousarray(rows)
    try:
        batch = np.atleast_1d(np.asarray(rows))
    except ValueError as error:
        raise UnknownSequenceError(f"rows are not a flat sequence of integers: {error}") from error
    if batch.size == 0:
        return np.zeros(0, np.int32)
    if batch.ndim != 1 or batch.dtype.kind not in "iu":
        raise UnknownSequenceError(f"rows must be a flat array of integers, got {batch.dtype} {batch.shape}")
    if batch.min() < 0 or batch.max() > np.iinfo(np.int32).max:
        raise UnknownSequenceError(f"rows must not be negative or beyond int32, got {batch.min()} to {batch.max()}")
    return batch.astype(np.int32)


def as_row(row: int) -> int:
    """Check one row's number. Raises UnknownSequenceError."""
    return as_count(row, "row", error=UnknownSequenceError)


def as_step_id(step_id: int) -> StepId:
    """Check a step's number. Raises StepError."""
    if isinstance(step_id, StepPlan):
        raise StepError("a plan was given where its number is wanted: give plan.step_id")
    return StepId(as_count(step_id, "step_id", most=2**63 - 1, error=StepError))


def require_status(state: SpaceState, batch: Int32Array, status: int) -> int:
    """Check that every row of a batch is there once, with that status; return the batch's mark.

    Raises:
        SequenceError: the subclass that fits the first row at fault.
    """
    mark = state.next_mark()
    place = state.loops.first_unfit_row(state.rows, batch, status, mark)
    if place >= 0:
        _refuse(state, batch, place, status)
    return mark


def _refuse(state: SpaceState, batch: Int32Array, place: int, wanted: int) -> NoReturn:
    row = int(batch[place])
    if not 0 <= row < len(state.rows):
        raise UnknownSequenceError(f"row {row} does not exist: the space has rows 0 to {len(state.rows) - 1}")
    if row in batch[:place]:
        raise SequenceError(f"row {row} appears twice in one batch")
    status = int(state.rows[row, STATUS])
    if status == VACANT:
        raise FreedSequenceError(f"row {row} serves no sequence: it was freed, or never allocated")
    if status == SWAPPED:
        raise SwappedOutError(f"row {row} is swapped out: swap it in first")
    if status in {LOST, LOST_ON_HOST}:
        raise LostSequenceError(f"row {row} lost its content in an aborted step: free it and allocate its tokens again")
    assert status == RUNNING
    assert wanted == SWAPPED
    raise SequenceError(f"row {row} is not swapped out")
