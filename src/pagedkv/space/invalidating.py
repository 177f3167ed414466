"""Releasing the device's memory, for an engine that sleeps or lends its memory to training: all content is lost.

Host memory stays as it is: swapped-out sequences can be swapped in once there is device memory again.
"""

import numpy as np

from pagedkv.blocks.causes import INVALIDATED
from pagedkv.contract.answers import InvalidatedMemory
from pagedkv.contract.spec import Row
from pagedkv.errors import StepError
from pagedkv.space.holding import tickets_out
from pagedkv.space.loading import freeze_loads
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.row_record import set_status
from pagedkv.tables.rows import LOST, RUNNING, STATUS

__all__ = ["invalidate_memory"]


def invalidate_memory(state: SpaceState, ledger: StepLedger) -> InvalidatedMemory:
    """Drop all device blocks from the prefix index, and lose the running rows.

    Raises:
        StepError: steps are in flight, or the open plan moves blocks; nothing was changed.
    """
    if ledger.in_flight:
        ids = [step.plan.step_id for step in ledger.in_flight]
        raise StepError(f"memory cannot be given back while steps {ids} are in flight: acknowledge or abort them")
    if ledger.has_moves:
        raise StepError("memory cannot be given back while the open plan copies or swaps blocks: plan the step first")
    state.is_changing = True
    for pool in state.pools.values():
        pool.clear_names(INVALIDATED)
    ledger.forget_duplicates()
    running = np.flatnonzero(state.rows[:, STATUS] == RUNNING)
    set_status(state.rows, running, LOST)
    answer = InvalidatedMemory(tuple(map(Row, running.tolist())), tickets_out(state), freeze_loads(state))
    state.is_changing = False
    return answer
