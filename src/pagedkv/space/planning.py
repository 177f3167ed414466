"""Closing the open step into a plan: the buffer is sized, then each part is written straight into it."""

from operator import itemgetter

import numpy as np

from pagedkv.blocks.life_cycle import lower_hold
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.plan_buffer import (
    COMPUTE,
    COPIES,
    DRAFT_STATES,
    ENTRIES,
    NEW_BLOCKS,
    NUM_WORDS,
    RUNS,
    STARTS,
    SWAPS_IN,
    SWAPS_OUT,
    UNKNOWN,
    PlanLayout,
    add_moves,
    padded,
    seal,
)
from pagedkv.space.filling import oldest_samplers
from pagedkv.space.state import DraftTable, Group, SpaceState
from pagedkv.space.steps import InFlightStep, Moves, StepLedger, read_only
from pagedkv.tables.aborting import renew_new
from pagedkv.tables.planning import collect_starts
from pagedkv.tables.rows import RUNNING, STATUS

__all__ = ["plan_step", "renew_new_blocks"]


def plan_step(state: SpaceState, ledger: StepLedger) -> StepPlan:
    """Close the open step. O(touched rows + changed table entries)."""
    rows, loops, layout = state.rows, state.loops, state.plan_layout
    state.is_changing = True
    num_touched, ascends, num_ranges = loops.collect_touched(rows, state.touched_scratch, state.write_counts)
    touched = state.touched_scratch[len(rows) - num_touched :]
    if not ascends:
        touched.sort()
    moves = _open_moves(ledger, layout)
    num_parts = 3 + len(state.own_starts) + 2 * state.is_overlapped + bool(state.draft_tables)  # as long as the ranges
    num_words = num_parts * padded(num_ranges) + sum(2 * padded(len(pairs)) for _, pairs in moves)
    writes = []
    for group, (num_runs, num_entries) in zip(state.tables, state.write_counts.tolist(), strict=True):
        if num_entries:
            writes.append((group, num_runs, num_entries))
            num_words += 3 * padded(num_runs) + 2 * padded(num_entries)  # an entry may be a new block as well
    step_id = state.open_step_id
    buffer = layout.new_buffer(step_id, num_words)
    for line, pairs in moves:
        add_moves(buffer, line, pairs)
    for group, num_runs, num_entries in writes:
        line = layout.lines[RUNS, group.index]
        loops.collect_writes(group.arrays, rows, touched, buffer, line, num_runs, num_entries)
    ends = np.empty(num_ranges, np.int32)
    line = layout.lines[COMPUTE, 0]
    offset = loops.collect_ranges(rows, touched, buffer, line, num_ranges, state.open_step, ends)
    _collect_new(state, buffer, [group for group, _, _ in writes])
    if state.is_overlapped:
        samplers = ledger.samplers = oldest_samplers(state, ledger, buffer[offset : offset + num_ranges])
        line = layout.lines[UNKNOWN, 0]
        loops.collect_unknown(
            rows, state.num_known, samplers.steps, buffer, line, offset, num_ranges, state.open_step, state.settled_step
        )
    _collect_beginnings(state, buffer, offset, num_ranges)
    words = buffer[: int(buffer[NUM_WORDS])]
    seal(words)
    read_only(words)
    plan = StepPlan(step_id, words, layout.pool_names)
    computing = words[offset : offset + num_ranges]
    starts = words[offset + padded(num_ranges) :][:num_ranges].copy()
    step = InFlightStep(plan, computing, state.serials[computing], starts, ends)
    for feature in state.features:
        feature.planned(step)
    _close(state, ledger, step)
    if moves and state.config.in_order:
        _end_waiting_for_copies(state, ledger, plan)
    state.is_changing = False
    return plan


def _collect_beginnings(state: SpaceState, buffer: Int32Array, ranges: int, num_ranges: int) -> None:
    """Add the starts of ranges in groups that have their own, and the first positions with states of their own."""
    lines = state.plan_layout.lines
    for group in state.own_starts:
        collect_starts(group.arrays, state.rows, buffer, lines[STARTS, group.index], ranges, num_ranges)
    if state.draft_tables:
        state.loops.collect_firsts(state.rows, buffer, lines[DRAFT_STATES, 0], ranges, num_ranges)


def _close(state: SpaceState, ledger: StepLedger, step: InFlightStep) -> None:
    ledger.close(step)
    for observer in state.observers.planned:
        observer.planned(step)
    state.advance_open_step()


def _collect_new(state: SpaceState, buffer: Int32Array, written: list[Group | DraftTable]) -> None:
    """Add the new blocks of each pool, found among the entries of groups whose tables have changed."""
    lines = state.plan_layout.lines
    for index, pool in enumerate(state.pools.values()):
        for group in written:
            if group.pool is pool:
                records, counts = pool.arrays.records, pool.arrays.counts
                line, entries = lines[NEW_BLOCKS, index], lines[ENTRIES, group.index]
                state.loops.collect_new(records, counts, buffer, line, entries)


def _open_moves(ledger: StepLedger, layout: PlanLayout) -> list[tuple[int, Moves]]:
    """Take the moves of the open step, each with its line in the plan's directory, in the order of the lines."""
    if not ledger.has_moves:
        return []
    moves = ledger.take_moves()
    kinds = ((SWAPS_OUT, moves.swaps_out), (SWAPS_IN, moves.swaps_in), (COPIES, moves.copies))
    placed = (
        (layout.lines[kind, layout.pool_names.index(name)], pairs)
        for kind, by_pool in kinds
        for name, pairs in by_pool.items()
    )
    return sorted(placed, key=itemgetter(0))


def _end_waiting_for_copies(state: SpaceState, ledger: StepLedger, plan: StepPlan) -> None:
    """Lower the hold of blocks that waited only until the plan that copies them was taken, since steps run in order.

    Blocks that a plan in flight swaps still wait for that plan: swaps may run beside the steps.
    """
    for copies in plan.copies:
        swapped = ledger.last_swaps(copies.pool)
        for block in {*copies.src_ids.tolist(), *copies.dst_ids.tolist()}:
            step = swapped.get(block, state.num_steps_before) - state.num_steps_before
            lower_hold(state.pools[copies.pool].arrays, block, step)


def renew_new_blocks(state: SpaceState, ledger: StepLedger, aborted: list[InFlightStep]) -> None:
    """Let the next plan list again, as new, blocks that aborted plans listed and that have no content yet.

    The rows are rewound already, and the next plan carries their tables.
    """
    for name, pool in state.pools.items():
        blocks = [new.block_ids for step in aborted for new in step.plan.new_blocks if new.pool == name]
        if not blocks:
            continue
        renewed = np.concatenate(blocks)
        is_concerned = np.zeros(pool.num_blocks, np.bool_)
        is_concerned[renewed] = True
        if ledger.has_device_writes:
            is_concerned[[block for block in renewed.tolist() if ledger.is_written(name, [block])]] = False
        for group in state.groups:
            if group.pool is pool:
                renew_new(*group.view, _running_rows_of(state, group.index, aborted), is_concerned)


def _running_rows_of(state: SpaceState, group: int, aborted: list[InFlightStep]) -> Int32Array:
    """Return running rows whose entries of a group aborted plans carried: int32, ascending."""
    written = [writes.rows for step in aborted for writes in step.plan.table_writes if writes.group == group]
    rows = np.unique(np.concatenate(written)) if written else np.zeros(0, np.int32)
    running: Int32Array = rows[state.rows[rows, STATUS] == RUNNING]
    return running
