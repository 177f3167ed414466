"""Checks of batches of rows: every row exists and has the right status, or an error names the row and its status."""

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import LARGEST_SIZE, as_count, as_counts
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.receipt import Receipt
from pagedkv.contract.spec import StepId
from pagedkv.errors import (
    ConfigurationError,
    FreedSequenceError,
    LostSequenceError,
    SequenceError,
    StepError,
    SwappedOutError,
    TokenError,
    UnknownSequenceError,
)
from pagedkv.space.state import SpaceState
from pagedkv.tables.rows import LOST, LOST_ON_HOST, NUM_TOKENS, RUNNING, STATUS, SWAPPED, VACANT

__all__ = [
    "as_num_outputs",
    "as_num_reached",
    "as_numbers",
    "as_step_id",
    "has_unknown",
    "require_known",
    "require_known_prefix",
    "require_status",
]


def as_step_id(step_id: int) -> StepId:
    """Check a step's number. Raises StepError."""
    if isinstance(step_id, StepPlan):
        raise StepError("got a plan instead of its number: give plan.step_id")
    return StepId(as_count(step_id, "step_id", most=2**63 - 1, error=StepError))


def as_numbers(batch: Int32Array, counts: npt.ArrayLike | None, num_tokens: int) -> Int32Array:
    """Check how many of ``num_tokens`` tokens each row gets; None means one each. Raises TokenError."""
    given = np.ones(len(batch), np.int64) if counts is None else as_counts(counts, len(batch), "counts")
    if given.min(initial=0) < 0 or given.max(initial=0) > num_tokens or given.sum() != num_tokens:
        raise TokenError(f"the counts {given.tolist()[:8]} do not add up to the {num_tokens} token ids that were given")
    return given.astype(np.int32)


def as_num_reached(state: SpaceState, continues: Receipt) -> int:
    """Return how many leading tokens an earlier life of the request had. Raises ConfigurationError."""
    if not state.config.receipts:
        raise ConfigurationError("no receipts are kept, so none continues: set receipts=True in the configuration")
    if not isinstance(continues, Receipt):
        raise ConfigurationError(f"continues must be a receipt, as free returns them, got {continues!r}")
    return continues.num_reached


def as_num_outputs(num_generated: npt.ArrayLike, batch: Int32Array) -> Int32Array:
    """Check how many tokens rows have generated. Raises TokenError."""
    outputs = as_counts(num_generated, len(batch), "num_generated")
    if outputs.min(initial=0) < 0:
        raise TokenError(f"row {batch[outputs.argmin()]} cannot have generated {outputs.min()} tokens")
    return np.minimum(outputs, LARGEST_SIZE).astype(np.int32)


def require_status(state: SpaceState, batch: Int32Array, status: int) -> int:
    """Check that every row of a batch has that status and is there once; return the batch's mark.

    Raises:
        SequenceError: the subclass that fits the first row at fault.
    """
    mark = state.next_mark()
    place = state.loops.first_unfit_row(state.rows, batch, status, mark)
    if place >= 0:
        _refuse(state, batch, place, status)
    return mark


def has_unknown(state: SpaceState, batch: Int32Array) -> bool:
    """Whether a row has unknown tokens."""
    return state.is_overlapped and bool(state.loops.first_unfilled(state.rows, state.num_known, batch) >= 0)


def require_known(state: SpaceState, batch: Int32Array, what: str) -> None:
    """Raise SequenceError if a row has unknown tokens. Changes nothing."""
    if not state.is_overlapped:
        return
    place = state.loops.first_unfilled(state.rows, state.num_known, batch)
    if place >= 0:
        row = int(batch[place])
        known, num_tokens = int(state.num_known[row]), int(state.rows[row, NUM_TOKENS])
        raise SequenceError(
            f"row {row} cannot be {what}: {num_tokens - known} of its {num_tokens} tokens are unknown; fill them in, "
            f"or roll it back to {known} tokens"
        )


def require_known_prefix(state: SpaceState, row: int, length: int) -> None:
    """Raise SequenceError if a row has fewer tokens, or fewer known ones, than the fork is to have. Changes nothing."""
    num_tokens = int(state.rows[row, NUM_TOKENS])
    if length > num_tokens:
        raise SequenceError(f"row {row} cannot be forked at {length} tokens: it has {num_tokens}")
    if length > state.num_known[row]:
        require_known(state, np.array([row], np.int32), "forked")


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
        raise LostSequenceError(
            f"row {row} lost its content, in an aborted step or with memory given back: free it and allocate its "
            "tokens again"
        )
    assert status == RUNNING
    assert wanted == SWAPPED
    raise SequenceError(f"row {row} is not swapped out")
