"""Closing the open step into a plan: how large its buffer is, then each part written straight into it."""

from operator import itemgetter

import numpy as np

from pagedkv.plan import StepPlan
from pagedkv.plan_buffer import (
    COMPUTE,
    COPIES,
    ENTRIES,
    NEW_BLOCKS,
    NUM_WORDS,
    RUNS,
    STARTS,
    SWAPS_IN,
    SWAPS_OUT,
    PlanLayout,
    add_moves,
    padded,
)
from pagedkv.space.state import SpaceState
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
    moves = _open_moves(ledger, layout) if ledger.has_moves else ()
    num_words = (3 + len(state.outsiders)) * padded(num_ranges) + sum(2 * padded(len(pairs)) for _, pairs in moves)
    writes = []
    for group, (num_runs, num_entries) in zip(state.groups, state.write_counts.tolist(), strict=True):
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
    for index, pool in enumerate(state.pools.values()):
        for group, _, _ in writes:
            if group.pool is pool:
                entries_line = layout.lines[ENTRIES, group.index]
                loops.collect_new(pool.arrays, buffer, layout.lines[NEW_BLOCKS, index], entries_line)
    for group in state.outsiders:
        collect_starts(group.arrays, rows, buffer, layout.lines[STARTS, group.index], offset, num_ranges)
    words = read_only(buffer[: int(buffer[NUM_WORDS])])
    plan = StepPlan(step_id, words, layout.pool_names)
    computing = words[offset : offset + num_ranges]
    ledger.close(InFlightStep(plan, computing, state.serials[computing], ends))
    state.advance_open_step()
    state.is_changing = False
    return plan


def _open_moves(ledger: StepLedger, layout: PlanLayout) -> list[tuple[int, Moves]]:
    """Take the moves of the open step, each with its line of a plan's directory, in the order of these."""
    moves = ledger.take_moves()
    kinds = ((SWAPS_OUT, moves.swaps_out), (SWAPS_IN, moves.swaps_in), (COPIES, moves.copies))
    placed = (
        (layout.lines[kind, layout.pool_names.index(name)], pairs)
        for kind, by_pool in kinds
        for name, pairs in by_pool.items()
    )
    return sorted(placed, key=itemgetter(0))


def renew_new_blocks(state: SpaceState, ledger: StepLedger, aborted: list[InFlightStep]) -> None:
    """Let the next plan hand out again what aborted plans handed out, where it has no content by now.

    The rows are rewound already, and the next plan carries their tables.
    """
    for name, pool in state.pools.items():
        blocks = [new.block_ids for step in aborted for new in step.plan.new_blocks if new.pool == name]
        is_concerned = np.zeros(pool.num_blocks, np.int32)
        for block in np.concatenate(blocks).tolist() if blocks else ():
            is_concerned[block] = not ledger.is_written(name, [block])
        for group in state.groups if blocks else ():
            if group.pool is pool:
                for row in _running_rows_of(state, group.index, aborted):
                    renew_new(pool.arrays, group.arrays, state.rows, row, is_concerned)


def _running_rows_of(state: SpaceState, group: int, aborted: list[InFlightStep]) -> list[int]:
    """Rows whose entries of a group aborted plans carried, and that run."""
    written: set[int] = set()
    for step in aborted:
        for writes in step.plan.table_writes:
            if writes.group == group:
                written.update(writes.rows.tolist())
    return [row for row in sorted(written) if state.rows[row, STATUS] == RUNNING]
