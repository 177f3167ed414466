"""Declaring content computed that was brought from outside, or that a device has written outside any plan.

This is refused if a device could still overwrite the declared content, or copy it before it is complete. These rows are
refused: one with a block that a move of the open plan, or of a plan in flight, writes; one with an uncomputed block
that a move of the open plan reads (a recurrent state would be advanced before the plan saves it); one that shares
blocks which a row outside the batch computes.

Only unsettled blocks are visited, so the cost does not grow with the rows' length: a row's unsettled blocks are its
last ones. Rows that rely on others are visited as a whole, since a block that another row computes may come before
blocks that are settled.
"""

from collections.abc import Iterator

import numpy as np

from pagedkv.blocks.record import (
    IN_USE,
    NEW,
    NULL_BLOCK,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import StepError
from pagedkv.space.crossing import declare_encoders, require_encoders_declarable
from pagedkv.space.drafting import require_declarable
from pagedkv.space.epochs import date_declared
from pagedkv.space.publishing import publish
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    GroupArrays,
    blocks_for,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.space.windows import slide_to_end


def mark_computed(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Count all known tokens of running rows as computed.

    Raises:
        StepError: see the module's text; nothing was changed.
    """
    if state.draft_tables:
        require_declarable(state, batch)
    _require_no_moves(state, ledger, batch)
    _require_no_other_computes(state, ledger, batch)
    require_encoders_declarable(state, batch)
    with state.changing:
        declare(state, ledger, batch)
        declare_encoders(state, batch)


def declare(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Count all known tokens of these rows as computed; the checks are done."""
    if ledger.in_flight:
        is_taken = np.zeros(len(state.rows), np.bool_)
        is_taken[batch] = True
        ledger.take_out(is_taken)
    for group in state.groups:
        settle_blocks(*group.view, batch, state.relies_on)
    if state.receipts is not None:
        state.receipts.declaring(batch)
    for tell in state.observers.declaring:
        tell(batch)
    if state.counts_epochs:
        date_declared(state, batch)
    for column in state.planned_columns.tolist():
        declare_planned(state.rows, batch, column)
    state.relies_on[batch] = 0
    if state.is_overlapped:
        _end_overlap(state, ledger, batch)
    if state.sliding_groups:
        slide_to_end(state, batch)


def _end_overlap(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Accept the tokens of overlapped rows that waited for a step, and publish the blocks that this completes."""
    overlapped = batch[state.num_known[batch] > 0]
    state.rows[overlapped, NUM_ACCEPTED] = state.rows[overlapped, NUM_TOKENS]
    state.num_known[overlapped] = 0
    publish(state, ledger, overlapped)


def _require_no_moves(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    for group in state.all_groups:
        written, read = ledger.moved_blocks(group.pool.name)
        if not (written or read):
            continue
        for row in batch.tolist():
            table = group.arrays.table[row, : int(state.rows[row, group.arrays.parameters[AT] + NUM_BLOCKS])].tolist()
            start = int(state.rows[row, group.planned])
            uncomputed = table[start // group.block_size :] if start < state.rows[row, group.positions] else []
            if touched := written.intersection(table) | read.intersection(uncomputed):
                raise StepError(
                    f"row {row} cannot be declared computed: a plan, open or in flight, copies or swaps its block "
                    f"{min(touched)} of pool {group.pool.name!r}; plan the step and acknowledge it first"
                )


def _require_no_other_computes(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Refuse blocks that a row outside the batch computes, in the open step or one in flight.

    If that step failed or that row were freed, a row would have to compute them that has lost a part of its window.
    """
    num_shared = sum(count_shared_unsettled(*group.view, batch, state.relies_on) for group in state.groups)
    if not num_shared:
        return
    for group in state.groups:
        starts = dict(_unsettled_starts(state, ledger, group))
        for row in set(starts) - set(batch.tolist()):
            _require_no_common_block(state, group, batch, row, starts[row])


def _require_no_common_block(state: SpaceState, group: Group, batch: Int32Array, row: int, start: int) -> None:
    stop = int(state.rows[row, group.arrays.parameters[AT] + NUM_BLOCKS])
    computed = group.arrays.table[row, start // group.block_size : stop]
    shared = np.isin(group.arrays.table[batch], computed[computed != NULL_BLOCK]).any(axis=1)
    if shared.any():
        raise StepError(
            f"row {row} computes blocks that row {int(batch[shared.argmax()])} shares, in the open step or in "
            "one in flight: declare both computed, or acknowledge the steps first"
        )


def _unsettled_starts(state: SpaceState, ledger: StepLedger, group: Group) -> Iterator[tuple[int, int]]:
    """Yield rows that compute in the open step or one in flight, and their first positions; the earliest comes last."""
    status, tokens, planned = (state.rows[:, column] for column in (STATUS, NUM_TOKENS, group.planned))
    for row in np.flatnonzero((status == RUNNING) & (planned < tokens)).tolist():
        yield row, int(planned[row])
    for step in reversed(ledger.in_flight):
        for row, start in step.live_starts(state.serials, group.index):
            if status[row] == RUNNING:
                yield row, start


@compiled
def count_shared_unsettled(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, relies_on: Int32Array
) -> int:
    """Count the unsettled blocks of a batch of rows that have several references. Changes nothing."""
    settled = pool.counts[SETTLED_STEP]
    num_shared = 0
    for row in batch:
        for index in range(blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE]) - 1, -1, -1):
            block = group.table[row, index]
            if pool.records[block, PENDING_STEP] > settled:
                num_shared += pool.records[block, REF_COUNT] > 1
            elif block != NULL_BLOCK and relies_on[row] <= settled:
                break
    return num_shared


@compiled
def settle_blocks(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, relies_on: Int32Array
) -> None:
    """Record that the content of all blocks of a batch of rows is computed."""
    settled = pool.counts[SETTLED_STEP]
    for row in batch:
        for index in range(blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE]) - 1, -1, -1):
            block = group.table[row, index]
            if pool.records[block, PENDING_STEP] > settled:
                pool.records[block, PENDING_STEP] = 0
                if pool.records[block, QUEUE] == NEW:
                    pool.records[block, QUEUE] = IN_USE
            elif block != NULL_BLOCK and relies_on[row] <= settled:
                break


@compiled
def declare_planned(rows: Int32Array, batch: Int32Array, planned: int) -> None:
    """Record in a column of a batch of rows that all tokens are planned."""
    for row in batch:
        rows[row, planned] = rows[row, NUM_TOKENS]
