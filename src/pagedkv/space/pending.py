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
from pagedkv.tables.pending import collect_pending_writers, dependency_start, hand_over_blocks, lower_start
from pagedkv.tables.rows import NUM_PLANNED, NUM_TOKENS, RUNNING, STATUS

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
            hand_over_blocks(*group.view, row, leaving_mark)


def stop_relying(state: SpaceState, row: int) -> None:
    """Before ``row`` leaves the open step: let it compute itself, later, what another row was to compute for it."""
    if state.relies_on[row] >= state.open_step:
        starts = [dependency_start(group.arrays, state.rows, row) for group in state.groups]
        for group, start in zip(state.groups, starts, strict=True):
            lower_start(group.arrays, state.rows, row, start)


def leave_shared_blocks(state: SpaceState, batch: Int32Array, counts: Int32Array, num_lookahead: int) -> None:
    """Before a batch grows: let rows that will copy a pending block on write compute it themselves.

    The copy is made before the step's forward pass, so tokens of the block that the open step computes are computed
    twice: by the row in its copy, and by one remaining holder in the original.
    """
    for group in state.groups:
        growing = batch[counts + slots_to_reserve(group.arrays, num_lookahead) > 0]
        for (block, index), writers in _writers_of_pending_blocks(state, group, growing).items():
            num_copies = min(len(writers), int(group.pool.arrays.records[block, REF_COUNT]) - 1)
            _leave(state, group, block, index, writers[:num_copies])


def _writers_of_pending_blocks(state: SpaceState, group: Group, batch: Int32Array) -> dict[tuple[int, int], list[int]]:
    """Return, for each shared, partly filled block that the open step computes, the rows of a batch that write it."""
    places = np.empty(len(batch), np.int32)
    num_writers = collect_pending_writers(*group.view, batch, places)
    writers: dict[tuple[int, int], list[int]] = {}
    for row in batch[places[:num_writers]].tolist():
        index = int(state.rows[row, NUM_TOKENS]) // group.block_size
        writers.setdefault((int(group.arrays.table[row, index]), index), []).append(row)
    return writers


def _leave(state: SpaceState, group: Group, block: int, index: int, leaving: list[int]) -> None:
    """Let each leaving row compute a pending block in its copy, and one staying row in the original."""
    rows, planned = state.rows, state.rows[:, group.planned]
    holds = (group.arrays.table[:, index] == block) & (rows[:, STATUS] == RUNNING)
    holders = np.flatnonzero(holds & (rows[:, NUM_TOKENS] > index * group.block_size))
    start = max(index * group.block_size, int(planned[holders].min()))
    for row in leaving:
        lower_start(group.arrays, rows, row, start)
    staying = np.setdiff1d(holders, leaving)
    if len(staying) and planned[staying].min() > start:
        lower_start(group.arrays, rows, int(staying[0]), start)
