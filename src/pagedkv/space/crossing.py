"""Cross-attention: blocks for an encoder's entries, which live and die with the row that reads them.

A group of cross-attention is none of ``SpaceState.groups``, so that growing, rolling back, hits and names know nothing
of it. It has a table, a pool, and the columns of a group, whose positions are the encoder's tokens. Most loops that
move, hand over or audit blocks take their number from the column ``NUM_POSITIONS``, and so serve both::

    tokens of the row       NUM_TOKENS = 7           [ a b c d ][ e f g . ]      grows, is rolled back
    tokens of its encoder   NUM_ENCODER_TOKENS = 5   [ A B C D ][ E . . . ]      until the row is freed

The first plan that computes the row writes all entries of its encoder. A fork shares them and never copies any, since
nothing is written behind them. If the row leaves before that plan, one of its forks inherits the task, as with any
pending block (:func:`~pagedkv.space.growing.hand_over`).

The entries of the row's own layers depend on the encoder's tokens, which are not in the names of its blocks. So with
prefix caching a row with an encoder must have keys that tell encoders apart: a medium that begins at its first token. A
salt would do as well, but is a tenant's, and so often the same for many encoders.
"""

import numpy as np

from pagedkv.blocks.life_cycle import acquire_all
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import IN_USE, NEW, OPEN_STEP, PENDING_STEP, QUEUE, REF_COUNT, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import most_positions
from pagedkv.errors import ConfigurationError, StepError, TokenError, TruncationError
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_POSITIONS,
    GroupArrays,
    blocks_for,
    note_change,
)
from pagedkv.space.state import SpaceState


def as_encoder_tokens(state: SpaceState, num_tokens: object, keys: RequestKeys) -> int:
    """Check a number of encoder's tokens, and that keys tell encoders apart where hits would need it.

    Raises:
        TokenError: more than a group has entries for.
        ConfigurationError: no group is cross-attention; prefix caching, and keys that are silent about the encoder.
    """
    number = as_count(num_tokens, "num_encoder_tokens")
    if not number:
        return 0
    if not state.cross_groups:
        raise ConfigurationError(f"num_encoder_tokens = {number}, but no group is a CrossAttention: configure one")
    most = min(most_positions(group.spec, 0) for group in state.cross_groups)
    if number > most:
        raise TokenError(f"num_encoder_tokens = {number} is more than max_encoder_tokens = {most}")
    begins_with_medium = bool(keys.media) and keys.media_arrays.begin == 0
    if state.config.prefix_caching and not begins_with_medium:
        raise ConfigurationError(
            f"num_encoder_tokens = {number} with keys that do not say which encoder's: prompts with other encoders "
            "would hit; give keys with a medium that begins at the first token, MediaSpan(0, 1, digest)"
        )
    return number


def num_encoder_blocks(state: SpaceState, num_tokens: int) -> dict[str, int]:
    """Count, by pool, the blocks for an encoder's tokens; nothing for pools without groups of cross-attention."""
    needed: dict[str, int] = {}
    for group in state.cross_groups:
        needed[group.pool.name] = needed.get(group.pool.name, 0) + blocks_for(num_tokens, group.block_size)
    return needed


def allocate_encoder(state: SpaceState, row: int, num_tokens: int) -> None:
    """Give a new row blocks for its encoder's tokens; the caller has checked that there are enough."""
    for group in state.cross_groups:
        state.loops[allocate_blocks](*group.view, row, num_tokens)


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.NUMBER, Like.NUMBER)
@compiled
def allocate_blocks(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, num_tokens: int) -> None:
    """Fill the table of a new row with new blocks, which the open step is to write."""
    at = group.parameters[AT]
    num_blocks = blocks_for(num_tokens, group.parameters[BLOCK_SIZE])
    acquire_all(pool, group.table[row, :num_blocks])
    for index in range(num_blocks):
        pool.records[group.table[row, index], PENDING_STEP] = pool.counts[OPEN_STEP]
    rows[row, at + NUM_BLOCKS] = num_blocks
    rows[row, group.parameters[NUM_POSITIONS]] = num_tokens
    note_change(rows, row, at, 0, num_blocks)


def require_encoders_planned(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    """Refuse to leave rows nothing to compute before their encoders are planned: no plan would have these rows.

    Raises:
        TruncationError: names the first such row.
    """
    for group in state.cross_groups:
        is_waiting = state.rows[batch, group.planned] < state.rows[batch, group.positions]
        unfit = is_waiting & (lengths <= state.rows[batch, NUM_PLANNED])
        if unfit.any():
            place = int(unfit.argmax())
            raise TruncationError(
                f"row {batch[place]} cannot be rolled back to {lengths[place]} tokens: none of them is to be computed, "
                f"but group {group.index} is still to write its encoder's entries; plan the step first"
            )


def require_encoders_declarable(state: SpaceState, batch: Int32Array) -> None:
    """Refuse rows whose encoder's entries are not there, and are shared with rows that are not declared as well.

    Raises:
        StepError: names the first such row.
    """
    for group in state.cross_groups:
        records = group.pool.arrays.records
        firsts = group.arrays.table[batch, 0]
        is_unsettled = records[firsts, PENDING_STEP] > state.settled_step
        num_holders = np.bincount(firsts, minlength=len(records))[firsts]
        unfit = is_unsettled & (records[firsts, REF_COUNT] > num_holders)
        if unfit.any():
            raise StepError(
                f"row {batch[unfit.argmax()]} cannot be declared computed: rows that are not named share its encoder's "
                "entries, which a step writes; declare all of them, or acknowledge the steps first"
            )


def declare_encoders(state: SpaceState, batch: Int32Array) -> None:
    """Count the encoder's entries of checked rows as written."""
    for group in state.cross_groups:
        for row in batch.tolist():
            num_blocks = int(state.rows[row, int(group.arrays.parameters[AT]) + NUM_BLOCKS])
            records, blocks = group.pool.arrays.records, group.arrays.table[row, :num_blocks]
            records[blocks, PENDING_STEP] = 0
            records[blocks[records[blocks, QUEUE] == NEW], QUEUE] = IN_USE
        state.rows[batch, group.planned] = state.rows[batch, group.positions]
