"""Which row computes the blocks that several rows wait for; :mod:`pagedkv.tables.pending` draws the rule.

A row that shares blocks which another row's step computes *relies* on that step: if the step fails, the row's memory is
undefined. A row that leaves the open step hands over the computation that others wait for, and stops relying on it.
"""

import numpy as np

from pagedkv.blocks.blocks import REF_COUNT
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.growing import slots_to_reserve
from pagedkv.tables.pending import (
    collect_pending_writers,
    dependency_start,
    hand_over_blocks,
    leave_blocks,
    lower_start,
)
from pagedkv.tables.rows import NUM_PLANNED, NUM_TOKENS

__all__ = ["hand_over", "leave_shared_blocks", "note_reliance", "stop_relying"]


def note_reliance(
    state: SpaceState, ledger: StepLedger, group: Group, batch: Int32Array, block_ids: Int32Array
) -> None:
    """Record that rows share blocks which another row's step still has to compute."""
    arrays = group.pool.arrays
    step = state.loops.last_pending_step(arrays.records, arrays.counts, block_ids)
    if step:
        ledger.shares_pending |= step == state.open_step
        state.relies_on[batch] = np.maximum(state.relies_on[batch], step)


def hand_over(state: SpaceState, row: int, leaving_mark: int) -> None:
    """Before ``row`` releases its blocks: let other rows compute the tokens that they wait for.

    Rows marked ``leaving_mark`` release their blocks as well.
    """
    if state.rows[row, NUM_PLANNED] < state.rows[row, NUM_TOKENS]:
        for group in state.groups:
            hand_over_blocks(*group.view, state.relies_on, row, leaving_mark)


def stop_relying(state: SpaceState, row: int) -> None:
    """Before ``row`` leaves the open step: let it compute itself, later, what another row was to compute for it."""
    if state.relies_on[row] >= state.open_step:
        starts = [dependency_start(group.arrays, state.rows, row) for group in state.groups]
        for group, start in zip(state.groups, starts, strict=True):
            lower_start(group.arrays, state.rows, row, start)


def leave_shared_blocks(state: SpaceState, batch: Int32Array, counts: Int32Array, num_lookahead: int) -> None:
    """Before a batch grows: let rows that will copy a pending block on write compute it themselves.

    The copy is made before the step's forward pass, so tokens of the block that the open step computes are computed
    twice: by the row in its copy, and by one remaining holder in the original. All writers of a block leave it,
    except the last row to refer to it, which copies nothing.

    Cost: O(table entries) where there are such rows, however many blocks they share.
    """
    for group in state.groups:
        growing = batch[counts + slots_to_reserve(group.arrays, num_lookahead) > 0]
        places = np.empty(len(growing), np.int32)
        writers = growing[places[: collect_pending_writers(*group.view, growing, places)]]
        if not len(writers):
            continue
        indexes = state.rows[writers, NUM_TOKENS] // group.block_size
        blocks, of_writer = np.unique(group.arrays.table[writers, indexes], return_inverse=True)
        numbers = np.zeros(group.pool.num_blocks, np.int32)
        numbers[blocks] = np.arange(1, len(blocks) + 1)
        leaves = np.zeros(len(state.rows), np.int32)
        order = np.argsort(of_writer, kind="stable")
        rank = np.arange(len(order)) - np.searchsorted(of_writer[order], of_writer[order])
        num_copies = group.pool.arrays.records[blocks, REF_COUNT] - 1
        leaving = order[rank < num_copies[of_writer[order]]]
        leaves[writers[leaving]] = of_writer[leaving] + 1
        leave_blocks(
            group.arrays, state.rows, np.unique(indexes), numbers, leaves, np.empty((len(blocks) + 1, 3), np.int32)
        )
