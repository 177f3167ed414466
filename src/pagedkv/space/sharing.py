"""Rows that share blocks: forking, and handing over tokens that nobody has computed yet."""

import numpy as np

from pagedkv.core.blocks import NAME, NULL_BLOCK, PENDING_STEP, REF_COUNT, Int32Array
from pagedkv.core.pool import drop_name
from pagedkv.core.rows import (
    FROZEN,
    NUM_ACCEPTED,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    TOUCHED,
)
from pagedkv.core.sharing import (
    dependency_start,
    find_holder,
    fork_row,
    last_shared_pending,
)
from pagedkv.core.tables import blocks_for, writes_shared_block
from pagedkv.errors import SequenceError, TooManySequencesError
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger

__all__ = ["fork", "hand_over", "leave_shared_blocks", "note_reliance", "stop_relying"]


def require_vacant_rows(state: SpaceState, num_rows: int) -> None:
    """Raise TooManySequencesError unless so many rows are vacant."""
    if num_rows > len(state.vacant_rows):
        raise TooManySequencesError(
            f"{num_rows} more sequences need {num_rows} rows, but only {len(state.vacant_rows)} of "
            f"max_sequences = {state.config.max_sequences} are vacant"
        )


def take_rows(state: SpaceState, num_rows: int) -> Int32Array:
    """Take vacant rows. Raises TooManySequencesError, with nothing taken."""
    require_vacant_rows(state, num_rows)
    taken = np.array([state.vacant_rows.pop() for _ in range(num_rows)], np.int32)
    state.relies_on[taken] = 0
    return taken


def fork(state: SpaceState, ledger: StepLedger, parent: int, num_children: int) -> Int32Array:
    """Make new rows that share every block of ``parent``.

    Raises:
        SequenceError: a recurrent state would have to be advanced for several sequences at once.
    """
    rows = state.rows
    if state.is_recurrent and rows[parent, NUM_PLANNED] < rows[parent, NUM_TOKENS]:
        raise SequenceError(
            f"row {parent} has tokens {rows[parent, NUM_PLANNED]} to {rows[parent, NUM_TOKENS]} not planned yet: "
            "its recurrent state can be forked only after plan_step"
        )
    children = take_rows(state, num_children)
    state.loops.clear_rows(rows, children, RUNNING)
    for child in children:
        rows[child, [NUM_TOKENS, NUM_ACCEPTED, FROZEN]] = rows[parent, [NUM_TOKENS, NUM_ACCEPTED, FROZEN]]
        rows[child, NUM_PLANNED] = rows[child, NUM_TOKENS]  # the parent computes what is not planned yet
        state.relies_on[child] = state.relies_on[parent]
        if parent in state.media_keys:
            state.media_keys[int(child)] = state.media_keys[parent]
            state.media_reach[child] = state.media_reach[parent]
    for group in state.groups:
        fork_row(group.pool.arrays, group.arrays, rows, parent, children)
        table = group.arrays.table[parent, : blocks_for(int(rows[parent, NUM_TOKENS]), group.block_size)]
        note_reliance(state, ledger, group, children, table)
    for chains in state.chains:
        chains[children] = chains[parent]
    return children


def note_reliance(
    state: SpaceState, ledger: StepLedger, group: Group, batch: Int32Array, block_ids: Int32Array
) -> None:
    """Note that rows share blocks which another row's step still has to compute."""
    step = state.loops.last_pending_step(group.pool.arrays, block_ids)
    if step:
        ledger.shares_pending |= step == state.open_step
        state.relies_on[batch] = np.maximum(state.relies_on[batch], step)


def hand_over(state: SpaceState, row: int, leaving_mark: int) -> None:
    """Before ``row`` gives its blocks up: find an heir for tokens that others wait for.

    Rows marked ``leaving_mark`` give their blocks up as well. Of the rows that share a block the longest
    sharer inherits, and computes what all the others share with it.
    """
    rows = state.rows
    start = int(rows[row, NUM_PLANNED])
    for group in state.groups:
        last = last_shared_pending(group.pool.arrays, group.arrays, rows, row)
        for index in range(last, start // group.block_size - 1, -1):
            block = int(group.arrays.table[row, index])
            if block == NULL_BLOCK:
                continue
            heir = find_holder(group.arrays, rows, block, index, leaving_mark)
            if heir >= 0:
                _inherit(state, heir, start)
                break
            if group.pool.arrays.records[block, NAME]:
                drop_name(group.pool.arrays, block)  # only rows that lost their content hold it: nobody computes it


def _inherit(state: SpaceState, heir: int, start: int) -> None:
    state.rows[heir, NUM_PLANNED] = min(state.rows[heir, NUM_PLANNED], start)
    state.rows[heir, TOUCHED] = 1


def stop_relying(state: SpaceState, row: int) -> None:
    """Before ``row`` leaves the open step: what another row was to compute for it, it computes itself later."""
    rows = state.rows
    if state.relies_on[row] < state.open_step:
        return
    start = min(dependency_start(group.arrays, rows, row) for group in state.groups)
    rows[row, NUM_PLANNED] = min(rows[row, NUM_PLANNED], start)


def leave_shared_blocks(state: SpaceState, batch: Int32Array) -> None:
    """Before a batch grows: rows that will copy a block on write settle who computes what is pending in it.

    The copy is made before the step's forward pass, so tokens of the block that the open step was to
    compute are computed twice: by the row in its copy, and by one remaining holder in the original.
    """
    for group in state.groups:
        for (block, index), writers in _writers_of_pending_blocks(state, group, batch).items():
            num_copies = min(len(writers), int(group.pool.arrays.records[block, REF_COUNT]) - 1)
            _leave(state, group, block, index, writers[:num_copies])


def _writers_of_pending_blocks(state: SpaceState, group: Group, batch: Int32Array) -> dict[tuple[int, int], list[int]]:
    """For each shared, partly filled block that the open step computes: the rows of a batch that write it."""
    records = group.pool.arrays.records
    writers: dict[tuple[int, int], list[int]] = {}
    for row in batch.tolist():
        num_tokens = int(state.rows[row, NUM_TOKENS])
        if writes_shared_block(group.pool.arrays, group.arrays, row, num_tokens):
            index = num_tokens // group.block_size
            block = int(group.arrays.table[row, index])
            if records[block, PENDING_STEP] == state.open_step:
                writers.setdefault((block, index), []).append(row)
    return writers


def _leave(state: SpaceState, group: Group, block: int, index: int, leaving: list[int]) -> None:
    """Settle who computes what is pending in a block: each leaving row in its copy, one staying row in it."""
    rows = state.rows
    holds = (group.arrays.table[:, index] == block) & (rows[:, STATUS] == RUNNING)
    holders = np.flatnonzero(holds & (rows[:, NUM_TOKENS] > index * group.block_size))
    start = max(index * group.block_size, int(rows[holders, NUM_PLANNED].min()))
    for row in leaving:
        _inherit(state, row, start)
    staying = np.setdiff1d(holders, leaving)
    if len(staying) and rows[staying, NUM_PLANNED].min() > start:
        _inherit(state, int(staying[0]), start)
