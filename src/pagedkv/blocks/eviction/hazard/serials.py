"""Serial numbers of runs, stored by blocks and ghosts, and whether such a run is still in the ring."""

from typing import Final

from pagedkv.blocks.eviction.hazard.horizon import lies_within
from pagedkv.blocks.eviction.hazard.layout import (
    NEXT_RUN,
    NUM_ALIVE,
    OLDEST_RUN,
    SERIAL_MASK,
    SUM_ALIVE,
    SUM_WITHIN,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array

__all__ = ["NO_RUN", "leave_run", "slot_of"]

NO_RUN: Final = -1


@inlined
def slot_of(state: Int64Array, num_slots: int, mark: int) -> int:
    """Find the place of a run in the ring by its serial number, negated or not; NO_RUN if it was removed."""
    serial = abs(mark)
    behind = (state[NEXT_RUN] - serial) & SERIAL_MASK
    if serial == 0 or behind == 0 or behind > state[NEXT_RUN] - state[OLDEST_RUN]:
        return NO_RUN
    return serial & (num_slots - 1)


@compiled
def leave_run(runs: Int32Array, state: Int64Array, mark: int) -> None:
    """Remove a block from the count of its run, if it is in one."""
    if mark > 0:
        slot = slot_of(state, len(runs), mark)
        if slot != NO_RUN:
            runs[slot, NUM_ALIVE] -= 1
            state[SUM_ALIVE] -= 1
            if lies_within(state, mark):
                state[SUM_WITHIN] -= 1
