"""Drafts whose token ids come later than their slots: a step is planned before a draft model has proposed them.

Such drafts are appended with any ids. They have slots, and a plan computes them, but nothing publishes, digests or
matches a draft before it is accepted; so their ids may still be replaced, and only then are they accepted or refused.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.blocks import NULL_BLOCK, REF_COUNT
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import SharedPrefixError, TokenError
from pagedkv.space.batches import as_numbers, require_known, require_status
from pagedkv.space.state import SpaceState
from pagedkv.tables.filling import forget_drafts
from pagedkv.tables.rows import NUM_ACCEPTED, NUM_TOKENS, RUNNING

__all__ = ["replace_drafts"]


def replace_drafts(state: SpaceState, batch: Int32Array, tokens: Int32Array, counts: npt.ArrayLike | None) -> None:
    """Replace the ids of each row's last tokens, which are drafts.

    Raises:
        SequenceError: a row that is not running, is named twice, or has unknown tokens.
        TokenError: counts that do not add up, or that exceed a row's drafts.
        SharedPrefixError: another sequence or a ticket holds drafts.
    """
    numbers = as_numbers(batch, counts, len(tokens))
    require_status(state, batch, RUNNING)
    require_known(state, batch, "given other drafts")
    accepted, num_tokens = (state.rows[batch, column] for column in (NUM_ACCEPTED, NUM_TOKENS))
    firsts = num_tokens - numbers
    if (firsts < accepted).any():
        place = int((firsts < accepted).argmax())
        raise TokenError(
            f"row {batch[place]} cannot be given {numbers[place]} other drafts: {num_tokens[place] - accepted[place]} "
            f"of its {num_tokens[place]} tokens are drafts"
        )
    _require_own(state, batch, firsts, num_tokens)
    first_by_row = np.zeros(len(state.rows), np.int32)
    first_by_row[batch] = firsts
    state.is_changing = True
    for group in state.cached_groups if state.config.prefix_caching else ():
        forget_drafts(group.pool.arrays, group.arrays, batch, firsts, num_tokens)
        state.loops.write_known(group.pool.arrays, group.arrays, first_by_row, batch, numbers, tokens)
    state.is_changing = False


def _require_own(state: SpaceState, batch: Int32Array, firsts: Int32Array, stops: Int32Array) -> None:
    """Refuse drafts whose blocks another sequence or a ticket holds, which would get other tokens too."""
    for group in state.groups:
        records, table = group.pool.arrays.records, group.arrays.table
        for row, first, stop in zip(batch.tolist(), firsts.tolist(), stops.tolist(), strict=True):
            blocks = table[row, first // group.block_size : -(-stop // group.block_size)] if first < stop else table[:0]
            if (records[blocks[blocks != NULL_BLOCK], REF_COUNT] > 1).any():
                raise SharedPrefixError(
                    f"row {row} cannot be given other drafts: other sequences or tickets hold its positions {first} "
                    f"to {stop - 1} in group {group.index}; accept them, or roll them back, first"
                )
