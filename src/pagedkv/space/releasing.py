"""Giving sequences up, and giving the whole prefix cache up."""

from pagedkv.core.blocks import NUM_EVENTS, Int32Array
from pagedkv.core.pool import drop_all_names
from pagedkv.core.rows import (
    FROZEN,
    LOST_ON_HOST,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    SWAPPED,
    VACANT,
)
from pagedkv.space.sharing import hand_over
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger

__all__ = ["free", "reset_prefix_cache"]


def free(state: SpaceState, batch: Int32Array, mark: int) -> None:
    """Give back the rows of a checked batch and all their blocks, in the batch's order."""
    rows = state.rows
    state.reserve_events(len(batch), int(rows[batch, NUM_TOKENS].sum()))
    status = rows[batch, STATUS]
    unplanned = (rows[batch, NUM_PLANNED] < rows[batch, NUM_TOKENS]) & (status == RUNNING)
    for row in batch[unplanned].tolist():
        hand_over(state, row, mark)
    on_host = (status == SWAPPED) | (status == LOST_ON_HOST)
    for group in state.groups:
        state.loops.release_rows(group.pool.arrays, group.arrays, rows, batch[~on_host])
        if group.host_pool is not None and on_host.any():
            state.loops.release_rows(group.host_pool.arrays, group.arrays, rows, batch[on_host])
    state.loops.clear_rows(rows, batch, VACANT)
    for row in batch.tolist() if state.media_keys else ():
        state.media_keys.pop(row, None)
    state.vacant_rows.extend(reversed(batch.tolist()))


def reset_prefix_cache(state: SpaceState, ledger: StepLedger) -> None:
    """Drop every name; running sequences keep their blocks but publish nothing any more.

    What they hold was computed before the reset (with the weights of before, if these change), so no later
    sequence may find it.
    """
    for pool in state.pools.values():
        pool.reserve_events(pool.num_blocks)
        num_events = pool.arrays.counts[NUM_EVENTS]
        drop_all_names(pool.arrays)
        pool.arrays.counts[NUM_EVENTS] = num_events  # one event says it all
        pool.log_cleared()
    state.rows[:, FROZEN] = state.rows[:, STATUS] != VACANT
    ledger.duplicates.clear()
    for step in ledger.in_flight:
        step.duplicates.clear()
