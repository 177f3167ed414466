"""Steps: closing the open one into a plan, and what acknowledging or aborting it sets free."""

from collections.abc import Iterator

import numpy as np

from pagedkv.core.blocks import LIFE, NAME, NULL_BLOCK, PENDING_STEP, REF_COUNT, SETTLED_STEP, Int32Array
from pagedkv.core.planning import (
    collect_ranges,
    collect_touched,
    collect_writes,
    count_writes,
    renew_pending,
    settle_blocks,
)
from pagedkv.core.pool import drop_name, release, reuse, withdraw_since
from pagedkv.core.rows import (
    AT,
    LOST,
    LOST_ON_HOST,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    SERIAL,
    STATUS,
    SWAPPED,
)
from pagedkv.core.tables import note_change, slide
from pagedkv.errors import StepError
from pagedkv.plan import AbortedSteps, BlockMoves, StepPlan, TableWrites, TokenRanges
from pagedkv.space.naming import publish
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import Duplicate, InFlightStep, StepLedger, read_only
from pagedkv.spec import RecurrentState, Row, StepId

__all__ = ["abort", "acknowledge", "mark_computed", "plan_step"]


def plan_step(state: SpaceState, ledger: StepLedger) -> StepPlan:
    """Close the open step."""
    rows = state.rows
    scratch = state.plan_scratch
    touched = scratch[3, : collect_touched(rows, scratch[3])]
    writes = tuple(
        _table_writes(group, rows, touched, num_entries)
        for group in state.groups
        if (num_entries := count_writes(group.arrays, rows, touched))
    )
    ranges = scratch[:3, : collect_ranges(rows, touched, scratch)].copy()
    swaps_out, swaps_in, copies = ledger.take_moves()
    compute = TokenRanges(*map(read_only, ranges))
    plan = StepPlan(state.open_step_id, swaps_out, swaps_in, copies, writes, compute)
    ledger.close(InFlightStep(plan, rows[compute.rows, SERIAL], compute.ends.copy(), []))
    state.advance_open_step()
    return plan


def _table_writes(group: Group, rows: Int32Array, touched: Int32Array, num_entries: int) -> TableWrites:
    runs = np.empty((3, len(touched)), np.int32)
    block_ids = np.empty(num_entries, np.int32)
    num_runs = collect_writes(group.arrays, rows, touched, runs, block_ids)
    rows_written, starts, counts = runs[:, :num_runs]
    return TableWrites(group.index, read_only(rows_written), read_only(starts), read_only(counts), read_only(block_ids))


def acknowledge(state: SpaceState, ledger: StepLedger, step_id: StepId) -> None:
    """The device has run the oldest step in flight: free what waited for it, slide windows, merge duplicates."""
    step = ledger.acknowledge(step_id)
    _settle(state, ledger)
    if any(not group.keeps_whole_prefix for group in state.groups):
        _slide_windows(state, step)
    for duplicate in step.duplicates:
        _merge(state, duplicate)


def _settle(state: SpaceState, ledger: StepLedger) -> None:
    """Free what waited for steps that are over: all before the oldest in flight."""
    unsettled = ledger.in_flight[0].plan.step_id - state.num_steps_before if ledger.in_flight else state.open_step
    for pool in state.all_pools:
        state.loops.settle(pool.arrays, unsettled - 1)


def _slide_windows(state: SpaceState, step: InFlightStep) -> None:
    rows = step.plan.compute.rows
    alive = (state.rows[rows, SERIAL] == step.serials) & (state.rows[rows, STATUS] == RUNNING)
    batch, computed = rows[alive], step.ends[alive]
    for group in state.groups:
        if not group.keeps_whole_prefix:
            slide(group.pool.arrays, group.arrays, state.rows, batch, computed)


def mark_computed(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Count everything that running rows know as computed. Raises StepError where another row computes it, too."""
    _require_no_other_computes(state, ledger, batch)
    for row in batch.tolist():
        ledger.take_out(row)
    for group in state.groups:
        for row in batch.tolist():
            settle_blocks(group.pool.arrays, group.arrays, state.rows, row)
    state.rows[batch, NUM_PLANNED] = state.rows[batch, NUM_TOKENS]
    state.relies_on[batch] = 0
    for group in state.groups:
        if not group.keeps_whole_prefix:
            slide(group.pool.arrays, group.arrays, state.rows, batch, state.rows[batch, NUM_TOKENS])


def _require_no_other_computes(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Refuse to declare blocks computed that a row outside the batch computes, in the open step or one in flight.

    Should that step fail, or that row be freed, the computation would fall to a row whose window has moved on.
    """
    starts = dict(_unsettled_starts(state, ledger))
    for group in state.groups:
        held = group.arrays.table[batch]
        for row in set(starts) - set(batch.tolist()):
            first = starts[row] // group.block_size
            computed = group.arrays.table[row, first : int(state.rows[row, group.arrays.parameters[AT] + NUM_BLOCKS])]
            shared = np.isin(held, computed[computed != NULL_BLOCK]).any(axis=1)
            if shared.any():
                raise StepError(
                    f"row {row} computes blocks that row {int(batch[shared.argmax()])} shares, in the open step or in "
                    "one in flight: declare both computed, or acknowledge the steps first"
                )


def _unsettled_starts(state: SpaceState, ledger: StepLedger) -> Iterator[tuple[int, int]]:
    """Rows that compute in the open step or in one in flight, with the first position; the earliest comes last."""
    status, tokens, planned = (state.rows[:, column] for column in (STATUS, NUM_TOKENS, NUM_PLANNED))
    for row in np.flatnonzero((status == RUNNING) & (planned < tokens)).tolist():
        yield row, int(planned[row])
    for step in reversed(ledger.in_flight):
        for row, start in _aborted_starts(state, [step]):
            if status[row] == RUNNING:
                yield row, start


def _merge(state: SpaceState, duplicate: Duplicate) -> None:
    """Replace a row's duplicate by the block that carries the name, if both are still what they were."""
    group = state.groups[duplicate.group]
    pool, table, row = group.pool.arrays, group.arrays.table, state.rows[duplicate.row]
    carrier = pool.records[duplicate.carrier]
    is_same = (
        row[SERIAL] == duplicate.serial
        and row[STATUS] == RUNNING
        and row[NUM_PLANNED] >= (duplicate.index + 1) * group.block_size
        and table[duplicate.row, duplicate.index] == duplicate.block
        and pool.records[duplicate.block, REF_COUNT] == 1
        and pool.records[duplicate.block, LIFE] == duplicate.block_life
        and carrier[NAME]
        and carrier[LIFE] == duplicate.carrier_life
    )
    if is_same and max(carrier[PENDING_STEP], pool.records[duplicate.block, PENDING_STEP]) <= pool.counts[SETTLED_STEP]:
        reuse(pool, duplicate.carrier)
        table[duplicate.row, duplicate.index] = duplicate.carrier
        release(pool, duplicate.block)
        note_change(state.rows, duplicate.row, int(group.arrays.parameters[AT]), duplicate.index, duplicate.index + 1)


def abort(state: SpaceState, ledger: StepLedger, step_id: StepId) -> AbortedSteps:
    """A step in flight failed: take back what it and all later ones promised.

    Names of content that was never computed are withdrawn; rows compute again what was planned for them. A row
    is lost whose memory the aborted steps leave undefined: it shares what another row was to compute, its
    blocks were to be copied or swapped, or a recurrent state was being advanced in place.
    """
    aborted = ledger.abort(step_id)
    state.reserve_events_for_all()
    _settle(state, ledger)
    for pool in state.all_pools:
        withdraw_since(pool.arrays, step_id - state.num_steps_before)
    lost = _lost_rows(state, ledger, aborted)
    rewound = _rewind_rows(state, aborted, lost)
    _declare_lost(state, lost)
    _tell_tables_again(state, aborted)
    uncomputed = (state.rows[:, STATUS] == RUNNING) & (state.rows[:, NUM_PLANNED] < state.rows[:, NUM_TOKENS])
    running = np.flatnonzero(uncomputed).astype(np.int32)
    for row in running.tolist():
        for group in state.groups:
            renew_pending(group.pool.arrays, group.arrays, state.rows, row)
    publish(state, ledger, running)
    ids = tuple(step.plan.step_id for step in aborted)
    return AbortedSteps(ids, tuple(map(Row, rewound)), tuple(map(Row, sorted(lost))))


def _lost_rows(state: SpaceState, ledger: StepLedger, aborted: list[InFlightStep]) -> set[int]:
    """Find the rows whose memory is undefined, and drop the names of undefined blocks."""
    first = aborted[0].plan.step_id - state.num_steps_before
    present = np.isin(state.rows[:, STATUS], (RUNNING, SWAPPED))
    lost = set(np.flatnonzero(present & (state.relies_on >= first)).tolist())
    for name, pool in state.pools.items():
        on_device = _destinations(name, [move for step in aborted for move in (*step.plan.copies, *step.plan.swaps_in)])
        on_host = _destinations(name, [move for step in aborted for move in step.plan.swaps_out])
        on_device, on_host = ledger.spread(name, on_device, on_host)
        for block in on_device:
            if pool.arrays.records[block, NAME]:
                drop_name(pool.arrays, block)
        lost |= _holders(state, name, RUNNING, on_device) | _holders(state, name, SWAPPED, on_host)
    if state.is_recurrent:
        lost |= {row for row, start in _aborted_starts(state, aborted) if _is_mid_state(state, start)}
    return lost


def _destinations(name: str, moves: list[BlockMoves]) -> set[int]:
    return {block for move in moves if move.pool == name for block in move.dst_ids.tolist()}


def _holders(state: SpaceState, pool_name: str, status: int, block_ids: set[int]) -> set[int]:
    """Rows with that status that hold any of these blocks."""
    if not block_ids:
        return set()
    rows = np.flatnonzero(state.rows[:, STATUS] == status)
    wanted = list(block_ids)
    return {
        int(row)
        for group in state.groups
        if group.pool.name == pool_name
        for row in rows
        if np.isin(group.arrays.table[row], wanted).any()
    }


def _aborted_starts(state: SpaceState, aborted: list[InFlightStep]) -> list[tuple[int, int]]:
    """Rows that the aborted steps computed for and that still serve the same sequence, with their starts."""
    starts = []
    for step in aborted:
        compute = step.plan.compute
        for row, start, serial in zip(compute.rows, compute.starts, step.serials, strict=True):
            if state.rows[row, SERIAL] == serial and state.rows[row, STATUS] in {RUNNING, SWAPPED}:
                starts.append((int(row), int(start)))
    return starts


def _is_mid_state(state: SpaceState, start: int) -> bool:
    """Tell whether a range that begins there reads its recurrent state from the block it also writes."""
    return any(start % group.block_size for group in state.groups if isinstance(group.spec, RecurrentState))


def _rewind_rows(state: SpaceState, aborted: list[InFlightStep], lost: set[int]) -> list[int]:
    rewound: dict[int, None] = {}
    for row, start in _aborted_starts(state, aborted):
        if row not in lost:
            state.rows[row, NUM_PLANNED] = min(state.rows[row, NUM_PLANNED], start)
            rewound[row] = None
    return list(rewound)


def _tell_tables_again(state: SpaceState, aborted: list[InFlightStep]) -> None:
    """Let the next plan carry the tables of running rows whose entries the aborted plans carried."""
    for writes in (writes for step in aborted for writes in step.plan.table_writes):
        at = int(state.groups[writes.group].arrays.parameters[AT])
        for row in writes.rows.tolist():
            if state.rows[row, STATUS] == RUNNING:
                note_change(state.rows, row, at, 0, int(state.rows[row, at + NUM_BLOCKS]))


def _declare_lost(state: SpaceState, lost: set[int]) -> None:
    for row in lost:
        state.rows[row, STATUS] = LOST if state.rows[row, STATUS] == RUNNING else LOST_ON_HOST
