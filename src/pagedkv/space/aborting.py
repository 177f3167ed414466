"""Aborting steps in flight: their effects are taken back, and what they leave undefined is lost.

Content that the aborted steps were to compute, on device or host, counts as never computed::

    its blocks                     leave the prefix index; the next plan that computes them publishes them again
    the row that was to compute    rewound: its next plan computes the positions again
    a row that shares it           lost: it may have moved on, and its first wrong position is not recorded
    destinations of copies, swaps  undefined, and so are blocks that the open plan copies from them: their rows are lost
    blocks of a ticket             the answer lists the ticket: its blocks stay held, and may be computed again
    a recurrent state in place     lost, if the aborted range reads the block that it also writes; tokens that are not
                                   accepted have their own states, in groups that keep draft states
"""

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import NAME
from pagedkv.blocks.causes import CALLED_OFF
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.sweeps import withdraw_since
from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.plan import BlockMoves
from pagedkv.contract.spec import Row, StepId, keeps_state
from pagedkv.space.filling import drop_unsampled
from pagedkv.space.holding import undefined_tickets
from pagedkv.space.planning import renew_new_blocks
from pagedkv.space.publishing import publish
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.stepping import settle
from pagedkv.space.steps import InFlightStep, StepLedger
from pagedkv.tables.aborting import find_holders, renew_pending
from pagedkv.tables.row_record import note_change, set_column, set_status
from pagedkv.tables.rows import (
    AT,
    LOST,
    LOST_ON_HOST,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DRAFT_STATES,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    SWAPPED,
)

__all__ = ["abort"]


def abort(state: SpaceState, ledger: StepLedger, step_id: StepId) -> AbortedSteps:
    """Abort a step in flight and all later ones, and take their effects back.

    Blocks that were never computed leave the prefix index; rows compute again what was planned for them. A row is lost
    if the aborted steps leave its memory undefined: it shares what another row was to compute, its blocks were to be
    copied or swapped, or a recurrent state was being advanced in place.
    """
    ledger.require_in_flight(step_id)
    state.is_changing = True
    aborted = ledger.abort(step_id)
    for observer in state.observers.aborted:
        for step in aborted:
            observer.aborted(step)
    first = step_id - state.num_steps_before
    moved = _moved_blocks(state, ledger, aborted)
    tickets = undefined_tickets(state, first, {name: on_device for name, (on_device, _) in moved.items()})
    settle(state, ledger)
    for pool in state.all_pools:
        withdraw_since(pool.arrays, first)
    lost = _lost_rows(state, moved, aborted)
    rewound = _rewind_rows(state, aborted, lost)
    if state.is_overlapped:
        drop_unsampled(state, rewound)
    for feature in state.features:
        feature.rewound(rewound)
    stranded = _stranded(state, rewound)
    lost |= stranded
    _declare_lost(state, lost)
    _mark_tables_changed(state, aborted)
    renew_new_blocks(state, ledger, aborted)
    uncomputed = (state.rows[:, STATUS] == RUNNING) & (state.rows[:, NUM_PLANNED] < state.rows[:, NUM_TOKENS])
    running = np.flatnonzero(uncomputed).astype(np.int32)
    for group in state.groups:
        renew_pending(*group.view, running, first)
    publish(state, ledger, running)
    ids = tuple(step.plan.step_id for step in aborted)
    answer = AbortedSteps(
        ids, tuple(Row(row) for row in rewound if row not in lost), tuple(map(Row, sorted(lost))), tickets
    )
    state.is_changing = False
    return answer


def _moved_blocks(
    state: SpaceState, ledger: StepLedger, aborted: list[InFlightStep]
) -> dict[str, tuple[set[int], set[int]]]:
    """Return, by pool, the blocks on the device and on the host that moves of aborted steps leave undefined."""
    moved = {}
    for name in state.pools:
        on_device = _destinations(name, [move for step in aborted for move in (*step.plan.copies, *step.plan.swaps_in)])
        on_host = _destinations(name, [move for step in aborted for move in step.plan.swaps_out])
        moved[name] = ledger.spread(name, on_device, on_host)
    return moved


def _lost_rows(state: SpaceState, moved: dict[str, tuple[set[int], set[int]]], aborted: list[InFlightStep]) -> set[int]:
    """Find the rows whose memory is undefined, and drop undefined blocks from the prefix index."""
    first = aborted[0].plan.step_id - state.num_steps_before
    present = np.isin(state.rows[:, STATUS], (RUNNING, SWAPPED))
    lost = set(np.flatnonzero(present & (state.relies_on >= first)).tolist())
    for name, (on_device, on_host) in moved.items():
        for pool, status, undefined in (
            (state.pools[name], RUNNING, on_device),
            (state.host_pools.get(name), SWAPPED, on_host),
        ):
            if pool is not None and undefined:
                _drop_names(pool, undefined)
                lost |= _holders(state, pool, status, undefined)
    for group in state.groups:
        if keeps_state(group.spec):  # it reads its state from the block that it also writes
            lost |= {
                row
                for row, start in _aborted_starts(state, aborted, group)
                if start % group.block_size and not _has_state(state, group, row, start)
            }
    return lost


def _has_state(state: SpaceState, group: Group, row: int, start: int) -> bool:
    """Return whether a row still has the state before a position: states of unaccepted tokens are not overwritten."""
    keeps_states = group.arrays.parameters[NUM_DRAFT_STATES] > 0
    return bool(keeps_states and start >= state.rows[row, NUM_ACCEPTED])


def _drop_names(pool: BlockPool, block_ids: set[int]) -> None:
    for block in block_ids:
        if pool.arrays.records[block, NAME]:
            drop_name(pool.arrays, block, CALLED_OFF)


def _destinations(name: str, moves: list[BlockMoves]) -> set[int]:
    return {block for move in moves if move.pool == name for block in move.dst_ids.tolist()}


def _holders(state: SpaceState, pool: BlockPool, status: int, block_ids: set[int]) -> set[int]:
    """Return the rows of that status that hold any of these blocks of a pool. O(table entries)."""
    is_wanted = np.zeros(pool.num_blocks, np.bool_)
    is_wanted[list(block_ids)] = True
    is_holder = np.zeros(len(state.rows), np.bool_)
    for group in state.groups:
        if pool in {group.pool, group.host_pool}:
            find_holders(group.arrays, state.rows, status, is_wanted, is_holder)
    return set(np.flatnonzero(is_holder).tolist())


def _aborted_starts(state: SpaceState, aborted: list[InFlightStep], group: Group) -> list[tuple[int, int]]:
    """Return rows that the aborted steps computed and whose sequence is still there, with their starts in a group."""
    return [
        (row, start)
        for step in aborted
        for row, start in step.live_starts(state.serials, group.index)
        if state.rows[row, STATUS] in {RUNNING, SWAPPED}
    ]


def _rewind_rows(state: SpaceState, aborted: list[InFlightStep], lost: set[int]) -> list[int]:
    rewound: dict[int, None] = {}
    sharing = next(group for group in state.cached_groups if not group.has_own_start)
    for group in (sharing, *state.own_starts):
        for row, start in _aborted_starts(state, aborted, group):
            if row not in lost:
                set_column(state.rows, row, group.planned, min(state.rows[row, group.planned], start))
                rewound[row] = None
    return list(rewound)


def _stranded(state: SpaceState, rewound: list[int]) -> set[int]:
    """Find rows that were rolled back into their hit while the step was in flight that was to compute it in some group.

    They have nothing to compute in the groups that hit, and a plan cannot have a row that computes nothing there.
    """
    num_tokens, planned = state.rows[:, NUM_TOKENS], state.rows[:, NUM_PLANNED]
    return {
        row
        for group in state.own_starts
        for row in rewound
        if state.rows[row, group.planned] < num_tokens[row] <= planned[row]
    }


def _mark_tables_changed(state: SpaceState, aborted: list[InFlightStep]) -> None:
    """Mark the table entries of running rows that aborted plans carried as changed, for the next plan."""
    for writes in (writes for step in aborted for writes in step.plan.table_writes):
        table = state.tables[writes.group].arrays
        at, num_slots = int(table.parameters[AT]), int(table.parameters[NUM_DRAFT_STATES])
        is_second = writes.group >= len(state.groups)
        for row in writes.rows.tolist():
            if state.rows[row, STATUS] == RUNNING:
                note_change(state.rows, row, at, 0, num_slots if is_second else int(state.rows[row, at + NUM_BLOCKS]))


def _declare_lost(state: SpaceState, lost: set[int]) -> None:
    for row in lost:
        set_status(state.rows, row, LOST if state.rows[row, STATUS] == RUNNING else LOST_ON_HOST)
