"""Acknowledging a step that has run: blocks that waited for it are freed, windows slide, duplicates merge."""

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.spec import StepId
from pagedkv.memory.space import filling
from pagedkv.memory.space.merging import merge
from pagedkv.memory.space.retaining import slide_group
from pagedkv.memory.space.state import SpaceState
from pagedkv.memory.space.steps import InFlightStep, StepLedger
from pagedkv.memory.tables.rows import LAST_STEP, RUNNING, STATUS

__all__ = ["acknowledge", "settle"]


def acknowledge(state: SpaceState, ledger: StepLedger, step_id: StepId) -> None:
    """Acknowledge the oldest step in flight: free blocks that waited for it, slide windows, merge duplicates."""
    ledger.require_oldest(step_id)
    state.is_changing = True
    step = ledger.acknowledge()
    settle(state, ledger)
    for observer in state.observers:
        observer.acknowledging(step)
    if state.is_overlapped:
        filling.accept(state, ledger, step)
    if any(not group.keeps_whole_prefix for group in state.groups):
        _slide_windows(state, step)
    merge(state, ledger, step.duplicates)
    for observer in state.observers:
        observer.acknowledged(step)
    state.is_changing = False


def settle(state: SpaceState, ledger: StepLedger) -> None:
    """Free the blocks that waited for settled steps: all steps before the oldest in flight."""
    unsettled = ledger.in_flight[0].plan.step_id - state.num_steps_before if ledger.in_flight else state.open_step
    for pool in state.all_pools:
        state.loops.settle(pool.arrays, unsettled - 1)


def _slide_windows(state: SpaceState, step: InFlightStep) -> None:
    rows = step.rows
    alive = (state.serials[rows] == step.serials) & (state.rows[rows, STATUS] == RUNNING)
    batch, computed = rows[alive], step.ends[alive]
    waited = _rows_that_waited(state, step)
    for group in state.groups:
        if not group.keeps_whole_prefix:
            slide_group(state, group, batch, computed)
            slide_group(state, group, waited, state.rows[waited, group.planned])


def _rows_that_waited(state: SpaceState, step: InFlightStep) -> Int32Array:
    """Find rows for which other rows computed in a settled step, and that are in no later one: forks, and hits."""
    number = step.plan.step_id - state.num_steps_before
    has_waited = (state.relies_on == number) & (state.rows[:, LAST_STEP] <= number)
    return np.flatnonzero(has_waited & (state.rows[:, STATUS] == RUNNING)).astype(np.int32)
