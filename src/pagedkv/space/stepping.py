"""Acknowledging a step that has run: blocks that waited for it are freed, features act, duplicates merge."""

from pagedkv.contract.spec import StepId
from pagedkv.space import filling
from pagedkv.space.merging import merge
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger

__all__ = ["acknowledge", "settle"]


def acknowledge(state: SpaceState, ledger: StepLedger, step_id: StepId) -> None:
    """Acknowledge the oldest step in flight: free blocks that waited for it, slide windows, merge duplicates."""
    ledger.require_oldest(step_id)
    state.is_changing = True
    step = ledger.acknowledge()
    settle(state, ledger)
    for observer in state.observers.acknowledging:
        observer.acknowledging(step)
    if state.is_overlapped:
        filling.accept(state, ledger, step)
    for feature in state.features:
        feature.computed(step)
    merge(state, ledger, step.duplicates)
    for observer in state.observers.acknowledged:
        observer.acknowledged(step)
    state.is_changing = False


def settle(state: SpaceState, ledger: StepLedger) -> None:
    """Free the blocks that waited for settled steps: all steps before the oldest in flight."""
    unsettled = ledger.in_flight[0].plan.step_id - state.num_steps_before if ledger.in_flight else state.open_step
    for pool in state.all_pools:
        state.loops.settle(pool.arrays, unsettled - 1)
