"""A step's life: it is closed into a plan, acknowledged or aborted; and what kernels read of it.

Closing: the buffer of the plan is sized, then each part (positions to compute, table entries to write) is written
straight into it (:mod:`pagedkv.plan_buffer`). Inputs of attention kernels, the slot of every position and lists of
pages, are read from the tables, for a plan or for rows. Acknowledging a step that has run frees the blocks that waited
for it, and merges duplicates. Aborting takes the effects of steps in flight back, and what they leave undefined is
lost.

Content that the aborted steps were to compute, on device or host, counts as never computed::

    its blocks                     leave the prefix index; the next plan that computes them publishes them again
    the row that was to compute    rewound: its next plan computes the positions again
    a row that shares it           lost: it may have moved on, and its first wrong position is not recorded
    destinations of copies, swaps  undefined, and so are blocks that the open plan copies from them: their rows are lost
    blocks of a ticket             the answer lists the ticket: its blocks stay held, and may be computed again
    a recurrent state in place     lost, if the aborted range reads the block that it also writes; tokens that are not
                                   accepted have their own states, in groups that keep draft states
"""

from operator import itemgetter

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.life_cycle import drop_name, lower_hold, settle_until
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import (
    CALLED_OFF,
    HOLD_STEP,
    IN_ORDER,
    IN_USE,
    NAME,
    NEW,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    PoolArrays,
)
from pagedkv.blocks.sweeps import withdraw_since
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.arguments import require_instance
from pagedkv.contract.arrays import BoolArray, Int32Array, Int64Array
from pagedkv.contract.plan import BlockMoves, PageLists, StepPlan
from pagedkv.contract.spec import Row, StepId, keeps_state
from pagedkv.errors import ConfigurationError, SequenceError, StepError
from pagedkv.plan_buffer import (
    ALIGNMENT,
    COMPUTE,
    COPIES,
    DRAFT_STATES,
    ENDS,
    ENTRIES,
    HEADER_WORDS,
    LENGTH,
    LINE_WORDS,
    NEW_BLOCKS,
    NUM_WORDS,
    OFFSET,
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
from pagedkv.space import filling
from pagedkv.space.epochs import date_plan, undate_rewound
from pagedkv.space.filling import drop_unsampled, oldest_samplers
from pagedkv.space.keeping import end_inside, name_inside
from pagedkv.space.loading import undefined_tickets
from pagedkv.space.publishing import merge, publish, rewind_tail
from pagedkv.space.replaying import num_replayed
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    LAST_STEP,
    LOST,
    LOST_ON_HOST,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_COMMON,
    NUM_DRAFT_STATES,
    NUM_PER_GROUP,
    NUM_PLANNED,
    NUM_POSITIONS,
    NUM_PUBLISHED,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    STATUS,
    SWAPPED,
    TOUCHED,
    GroupArrays,
    blocks_for,
    clear_changes,
    first_unfilled,
    is_unfilled,
    note_change,
    touch,
)
from pagedkv.space.state import Checkpoints, DraftTable, Group, SpaceState
from pagedkv.space.states import name_states
from pagedkv.space.steps import InFlightStep, Moves, StepLedger, read_only
from pagedkv.space.windows import slide_after


def plan_step(  # noqa: C901, PLR0912 - what only some spaces have is called where it happens
    state: SpaceState, ledger: StepLedger
) -> StepPlan:
    """Close the open step. O(touched rows + changed table entries)."""
    rows, loops, layout = state.rows, state.loops, state.plan_layout
    with state.changing:
        num_touched, ascends, num_ranges = loops[collect_touched](rows, state.scratch.touched, state.scratch.writes)
        touched = state.scratch.touched[len(rows) - num_touched :]
        if not ascends:
            touched.sort()
        moves = _open_moves(ledger, layout) if ledger.has_moves else []
        # Parts that are as long as the ranges.
        num_parts = 3 + len(state.own_starts) + 2 * state.is_overlapped + bool(state.draft_tables)
        num_parts += len(state.cross_groups)
        num_words = num_parts * padded(num_ranges) + sum(2 * padded(len(pairs)) for _, pairs in moves)
        writes = []
        for group, (num_runs, num_entries) in zip(state.tables, state.scratch.writes.tolist(), strict=True):
            if num_entries:
                writes.append((group, num_runs, num_entries))
                num_words += 3 * padded(num_runs) + 2 * padded(num_entries)  # an entry may be a new block as well
        step_id = state.open_step_id
        buffer = layout.new_buffer(step_id, num_words)
        for line, pairs in moves:
            add_moves(buffer, line, pairs)
        for group, num_runs, num_entries in writes:
            line = layout.lines[RUNS, group.index]
            loops[collect_writes](group.arrays, rows, touched, buffer, line, num_runs, num_entries)
        ends = np.empty(num_ranges, np.int32)
        line = layout.lines[COMPUTE, 0]
        offset = loops[collect_ranges](rows, touched, buffer, line, num_ranges, state.open_step, ends)
        if writes:
            _collect_new(state, buffer, [group for group, _, _ in writes])
        if state.is_overlapped:
            samplers = ledger.samplers = oldest_samplers(state, ledger, buffer[offset : offset + num_ranges])
            line = layout.lines[UNKNOWN, 0]
            open_step, settled = state.open_step, state.settled_step
            loops[collect_unknown](
                rows, state.num_known, samplers.steps, buffer, line, offset, num_ranges, open_step, settled
            )
        if state.own_starts or state.draft_tables:
            _collect_beginnings(state, buffer, offset, num_ranges)
        words = buffer[: int(buffer[NUM_WORDS])]
        seal(words)
        read_only(words)
        plan = StepPlan(step_id, words, layout.pool_names)
        computing = words[offset : offset + num_ranges]
        starts = words[offset + padded(num_ranges) :][:num_ranges].copy()
        step = InFlightStep(plan, computing, state.serials[computing], starts, ends)
        if state.counts_epochs:
            date_plan(state, step)
        if state.checkpoints is not None:
            _name_states(state, state.checkpoints, step)
        ledger.close(step)
        if state.receipts is not None:
            state.receipts.planned(step)
        for tell in state.observers.planned:
            tell(step)
        state.advance_open_step()
        if moves and state.config.in_order:
            _end_waiting_for_copies(state, ledger, plan)
    return plan


def _name_states(state: SpaceState, checkpoints: Checkpoints, step: InFlightStep) -> None:
    name_states(state, step)
    if checkpoints.ends or checkpoints.inside:
        name_inside(state, step)


def _collect_beginnings(state: SpaceState, buffer: Int32Array, ranges: int, num_ranges: int) -> None:
    """Add the starts of ranges in groups that have their own, and the first positions with states of their own."""
    lines = state.plan_layout.lines
    for group in state.own_starts:
        collect_starts(group.arrays, state.rows, buffer, lines[STARTS, group.index], ranges, num_ranges)
    if state.draft_tables:
        state.loops[collect_firsts](state.rows, buffer, lines[DRAFT_STATES, 0], ranges, num_ranges)
    for group in state.cross_groups:
        collect_ends(group.arrays, state.rows, buffer, lines[ENDS, group.index], ranges, num_ranges)


def _collect_new(state: SpaceState, buffer: Int32Array, written: list[Group | DraftTable]) -> None:
    """Add the new blocks of each pool, found among the entries of groups whose tables have changed."""
    lines = state.plan_layout.lines
    for index, pool in enumerate(state.pools.values()):
        for group in written:
            if group.pool is pool:
                records, counts = pool.arrays.records, pool.arrays.counts
                line, entries = lines[NEW_BLOCKS, index], lines[ENTRIES, group.index]
                state.loops[collect_new](records, counts, buffer, line, entries)


def _open_moves(ledger: StepLedger, layout: PlanLayout) -> list[tuple[int, Moves]]:
    """Take the moves of the open step, each with its line in the plan's directory, in the order of the lines."""
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
        for group in state.all_groups:
            if group.pool is pool:
                renew_new(*group.view, _running_rows_of(state, group.index, aborted), is_concerned)


def _running_rows_of(state: SpaceState, group: int, aborted: list[InFlightStep]) -> Int32Array:
    """Return running rows whose entries of a group aborted plans carried: int32, ascending."""
    written = [writes.rows for step in aborted for writes in step.plan.table_writes if writes.group == group]
    rows = np.unique(np.concatenate(written)) if written else np.zeros(0, np.int32)
    running: Int32Array = rows[state.rows[rows, STATUS] == RUNNING]
    return running


@inlined
def place_part(buffer: Int32Array, line: int, num_arrays: int, length: int) -> int:
    """Append a part to a plan's buffer; return where its first array begins.

    The padding is zeroed here; the caller writes the arrays.
    """
    offset = int(buffer[NUM_WORDS])
    entry = HEADER_WORDS + LINE_WORDS * line
    stride = (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    buffer[entry + OFFSET] = offset if length > 0 else 0
    buffer[entry + LENGTH] = length
    for place in range(num_arrays):
        for word in range(offset + place * stride + length, offset + (place + 1) * stride):
            buffer[word] = 0
    buffer[NUM_WORDS] = offset + num_arrays * stride
    return offset


@takes(Like.ROWS, Like.IDS, Like.PAIRS)
@compiled
def collect_touched(rows: Int32Array, out: Int32Array, counts: Int32Array) -> tuple[int, int, int]:
    """Move the touched rows that run to the end of ``out``, in the order of touching, row 0 first; empty the list.

    Args:
        counts: int32 ``[groups, 2]``; becomes, by group, the runs of table entries that changed, and the entries.

    Returns the number of rows, 1 if they ascend, else 0, and the number of rows with positions to compute.
    O(touched rows x groups).
    """
    counts[:] = 0
    first = len(out)
    num_ranges = 0
    ascends = 1
    newer = len(rows)
    row = rows[0, TOUCHED] - 1
    while True:
        place = unsigned(row)
        following = rows[place, TOUCHED] - 1
        rows[place, TOUCHED] = 0
        if rows[place, STATUS] == RUNNING:
            first -= 1
            out[first] = row
            if row > newer:
                ascends = 0
            newer = row
            num_ranges += rows[place, NUM_PLANNED] < rows[place, NUM_TOKENS]
            for group in range(len(counts)):
                at = NUM_COMMON + group * NUM_PER_GROUP
                num_changed = rows[place, unsigned(at + DIRTY_TO)] - rows[place, unsigned(at + DIRTY_FROM)]
                if num_changed > 0:
                    counts[group, 0] += 1
                    counts[group, 1] += num_changed
                else:  # nothing to collect, but a rollback may have left an empty range
                    clear_changes(rows, place, at)
        if row == 0:
            break
        row = following
    rows[0, TOUCHED] = 1
    return len(out) - first, ascends, num_ranges


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.NUMBER, Like.NUMBER, Like.NUMBER, Like.IDS)
@compiled
def collect_ranges(
    rows: Int32Array, touched: Int32Array, buffer: Int32Array, line: int, num_ranges: int, step: int, ends: Int32Array
) -> int:
    """Plan all positions that are not planned yet: write rows, starts and ends; return where the rows begin.

    Args:
        step: the open step, which becomes the last planned one of these rows.
        ends: int32 ``[num_ranges]``; receives a copy of the ends, for the space to keep.
    """
    offset = place_part(buffer, line, 3, num_ranges)
    stride = (num_ranges + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    starts, stops = offset + stride, offset + 2 * stride
    place = 0
    for row in touched:
        index = unsigned(row)
        end = rows[index, NUM_TOKENS]
        if rows[index, NUM_PLANNED] < end:
            buffer[unsigned(offset + place)] = row
            buffer[unsigned(starts + place)] = rows[index, NUM_PLANNED]
            buffer[unsigned(stops + place)] = end
            ends[unsigned(place)] = end
            rows[index, LAST_STEP] = step
            rows[index, NUM_PLANNED] = end
            place += 1
    return offset


@compiled
def collect_starts(
    group: GroupArrays, rows: Int32Array, buffer: Int32Array, line: int, ranges: int, num_ranges: int
) -> None:
    """Write the starts of all ranges in a group with starts of its own, and record that these are planned.

    ``ranges`` is where :func:`collect_ranges` has put the rows.
    """
    planned = group.parameters[PLANNED]
    offset = place_part(buffer, line, 1, num_ranges)
    for place in range(num_ranges):
        row = buffer[ranges + place]
        buffer[offset + place] = rows[row, planned]
        rows[row, planned] = rows[row, group.parameters[NUM_POSITIONS]]


@compiled
def collect_ends(
    group: GroupArrays, rows: Int32Array, buffer: Int32Array, line: int, ranges: int, num_ranges: int
) -> None:
    """Write the ends of all ranges in a group of cross-attention: the encoders' tokens of their rows.

    ``ranges`` is where :func:`collect_ranges` has put the rows.
    """
    offset = place_part(buffer, line, 1, num_ranges)
    for place in range(num_ranges):
        buffer[offset + place] = rows[buffer[ranges + place], group.parameters[NUM_POSITIONS]]


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.NUMBER, Like.NUMBER, Like.NUMBER, Like.NUMBER, Like.NUMBER)
@compiled
def collect_unknown(
    rows: Int32Array,
    num_known: Int32Array,
    samplers: Int32Array,
    buffer: Int32Array,
    line: int,
    ranges: int,
    num_ranges: int,
    step: int,
    settled: int,
) -> None:
    """Write how many unknown tokens the row of each range has, and how many steps ago the first is sampled.

    Writes nothing if no row has any. A token that is sampled neither by a step in ``samplers`` nor by this one was
    sampled by a step that is over; ``settled``, the last of these, is written for it.
    """
    stride = (num_ranges + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    if first_unfilled(rows, num_known, buffer[ranges : ranges + num_ranges]) < 0:
        return
    offset = place_part(buffer, line, 2, num_ranges)
    counts, lags = buffer[offset : offset + num_ranges], buffer[offset + stride : offset + stride + num_ranges]
    for place in range(num_ranges):
        row = unsigned(buffer[ranges + place])
        counts[place] = 0
        lags[place] = 0
        if not is_unfilled(rows, num_known, row):
            continue
        counts[place] = rows[row, NUM_TOKENS] - num_known[row]
        if samplers[row] > 0:
            lags[place] = step - samplers[row]
        elif num_known[row] <= buffer[ranges + stride + place]:
            lags[place] = step - settled


@takes(Like.ROWS, Like.IDS, Like.NUMBER, Like.NUMBER, Like.NUMBER)
@compiled
def collect_firsts(rows: Int32Array, buffer: Int32Array, line: int, ranges: int, num_ranges: int) -> None:
    """Write the first position of each range's row that has a state of its own; nothing if no row has any.

    ``ranges`` is where :func:`collect_ranges` has put the rows.
    """
    num_open = 0
    for place in range(num_ranges):
        row = buffer[ranges + place]
        num_open += rows[row, NUM_TOKENS] - rows[row, NUM_ACCEPTED]
    if num_open == 0:
        return
    offset = place_part(buffer, line, 1, num_ranges)
    for place in range(num_ranges):
        buffer[offset + place] = rows[buffer[ranges + place], NUM_ACCEPTED]


@takes(Like.GROUP, Like.ROWS, Like.IDS, Like.IDS, Like.NUMBER, Like.NUMBER, Like.NUMBER)
@compiled
def collect_writes(
    group: GroupArrays,
    rows: Int32Array,
    touched: Int32Array,
    buffer: Int32Array,
    line: int,
    num_runs: int,
    num_entries: int,
) -> None:
    """Write the changed entries into the plan's buffer: the runs, and in the next line their block ids."""
    at = group.parameters[AT]
    run = place_part(buffer, line, 3, num_runs)
    entry = place_part(buffer, line + 1, 1, num_entries)
    stride = (num_runs + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    for row in touched:
        start = rows[row, at + DIRTY_FROM]
        stop = rows[row, at + DIRTY_TO]
        if stop > start:
            buffer[run] = row
            buffer[run + stride] = start
            buffer[run + 2 * stride] = stop - start
            for index in range(start, stop):
                buffer[entry + index - start] = group.table[row, index]
            run += 1
            entry += stop - start
        clear_changes(rows, row, at)


@takes(Like.RECORDS, Like.COUNTS, Like.IDS, Like.NUMBER, Like.NUMBER)
@compiled
def collect_new(records: Int32Array, counts: Int64Array, buffer: Int32Array, line: int, entries_line: int) -> None:
    """Add the new blocks among a group's written entries to their pool's part, and mark them as no longer new.

    These entries include every new block of a running row, since the row that took it, or shares it, has recorded a
    change of its table. The part is the last one in the buffer, so that it can grow.
    """
    entry = HEADER_WORDS + LINE_WORDS * line
    entries = HEADER_WORDS + LINE_WORDS * entries_line
    length = buffer[entry + LENGTH]
    if length > 0:
        buffer[NUM_WORDS] = buffer[entry + OFFSET]
    offset = buffer[NUM_WORDS]
    first = buffer[entries + OFFSET]
    for place in range(first, first + buffer[entries + LENGTH]):
        block = buffer[place]
        if records[block, QUEUE] == NEW:
            records[block, QUEUE] = IN_USE
            if not counts[IN_ORDER]:
                records[block, HOLD_STEP] = counts[OPEN_STEP]  # the plan may have it cleared
            buffer[offset + length] = block
            length += 1
    place_part(buffer, line, 1, length)


def slot_mapping(state: SpaceState, ledger: StepLedger, plan: StepPlan, group: Group) -> Int64Array:
    """Return the slot of every position that the last plan computes.

    Raises:
        ConfigurationError: the group is a recurrent state.
        StepError: the plan is not the last one made, or another space's.
        SequenceError: a row of the plan has changed since.
    """
    _require_slots(group)
    require_instance(plan, StepPlan, "plan", StepError)
    step = ledger.in_flight[-1] if ledger.in_flight else None
    if step is None or step.plan.step_id != plan.step_id:
        last = "none is in flight" if step is None else f"the last in flight is {step.plan.step_id}"
        raise StepError(f"slots of step {plan.step_id} cannot be computed: {last}; call this right after plan_step")
    if step.plan is not plan and step.plan != plan:
        raise StepError(f"slots of step {plan.step_id} cannot be computed: the plan is another space's")
    compute = step.plan.compute_in(group.index)
    slots = np.empty(compute.num_tokens, np.int64)
    place = write_slots(
        group.arrays,
        state.rows,
        compute.rows,
        compute.starts,
        compute.ends,
        step.serials,
        state.serials[compute.rows],
        slots,
    )
    if place >= 0:
        raise SequenceError(
            f"row {compute.rows[place]} does not hold positions {compute.starts[place]} to {compute.ends[place]} of "
            f"step {plan.step_id} any more as planned: call this right after plan_step, before rows change"
        )
    return slots


def page_lists(state: SpaceState, batch: Int32Array, group: Group) -> PageLists:
    """List the pages of running rows. Raises ConfigurationError for a recurrent state."""
    _require_slots(group)
    indptr = np.empty(len(batch) + 1, np.int32)
    last_page_len, starts = np.empty((2, len(batch)), np.int32)
    count_pages(group.arrays, state.rows, batch, indptr, last_page_len, starts)
    indices = np.empty(int(indptr[-1]), np.int32)
    write_pages(group.arrays, batch, starts, indptr, indices)
    return PageLists(indptr, indices, last_page_len, starts)


def _require_slots(group: Group) -> None:
    if keeps_state(group.spec):
        raise ConfigurationError(
            f"group {group.index} is a recurrent state: a block holds one state, not tokens in slots; "
            "see block_ids for the blocks of its states"
        )


@compiled
def write_slots(
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
    serials: Int32Array,
    current: Int32Array,
    slots: Int64Array,
) -> int:
    """Write the slots of positions ``[starts[i], ends[i])`` of each ``batch[i]``, one after the other.

    Returns -1, or the first place with a row that has changed since the last plan: it serves another sequence
    (``current[i]``) than ``serials[i]``, or its entries of these positions have changed.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    slot = 0
    for place in range(len(batch)):
        row = batch[place]
        first = starts[place] // block_size
        stop = blocks_for(ends[place], block_size)
        if rows[row, STATUS] != RUNNING or current[place] != serials[place] or rows[row, at + NUM_BLOCKS] < stop:
            return place
        if max(first, rows[row, at + DIRTY_FROM]) < min(stop, rows[row, at + DIRTY_TO]):
            return place
        position = starts[place]
        for index in range(first, stop):
            block = int(group.table[row, index])  # 64 bits: a slot may be beyond 32
            if block == NULL_BLOCK:
                return place
            end = min(ends[place], (index + 1) * block_size)
            shift = (block - index) * block_size
            for offset in range(end - position):
                slots[slot + offset] = position + offset + shift
            slot += end - position
            position = end
    return -1


@compiled
def count_pages(
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    indptr: Int32Array,
    last_page_len: Int32Array,
    starts: Int32Array,
) -> None:
    """Count the pages with content of each row of a batch, which are those after the last gap in its table.

    ``indptr`` is int32 ``[rows + 1]``; the others are int32 ``[rows]``.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    indptr[0] = 0
    for place in range(len(batch)):
        row = batch[place]
        num_tokens = rows[row, group.parameters[NUM_POSITIONS]]
        first = min(rows[row, at + FIRST_BLOCK], blocks_for(num_tokens, block_size))
        if first <= group.parameters[NUM_SINK_BLOCKS]:
            first = 0  # the entries below are sinks, which are all kept
        num_pages = blocks_for(num_tokens, block_size) - first
        indptr[place + 1] = indptr[place] + num_pages
        last_page_len[place] = (num_tokens - 1) % block_size + 1 if num_pages > 0 else 0
        starts[place] = min(first * block_size, num_tokens)


@compiled
def write_pages(
    group: GroupArrays, batch: Int32Array, starts: Int32Array, indptr: Int32Array, indices: Int32Array
) -> None:
    """Write the block ids of the pages that :func:`count_pages` counted."""
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        first = blocks_for(starts[place], block_size)
        for page in range(indptr[place + 1] - indptr[place]):
            indices[indptr[place] + page] = group.table[batch[place], first + page]


def acknowledge(state: SpaceState, ledger: StepLedger, step_id: StepId) -> None:
    """Acknowledge the oldest step in flight: free blocks that waited for it, slide windows, merge duplicates."""
    ledger.require_oldest(step_id)
    with state.changing:
        step = ledger.acknowledge()
        settle(state, ledger)
        if state.checkpoints is not None and state.checkpoints.inside:
            end_inside(state, {step_id})
        if state.receipts is not None:
            state.receipts.acknowledging(step, num_replayed(state, step) if state.replaying_groups else None)
        for tell in state.observers.acknowledging:
            tell(step)
        if state.is_overlapped:
            filling.accept(state, ledger, step)
        if state.sliding_groups:
            slide_after(state, step)
        if any(step.duplicates):
            merge(state, ledger, step.duplicates)
        for tell in state.observers.acknowledged:
            tell(step)


def settle(state: SpaceState, ledger: StepLedger) -> None:
    """Free the blocks that waited for settled steps: all steps before the oldest in flight."""
    unsettled = ledger.in_flight[0].plan.step_id - state.num_steps_before if ledger.in_flight else state.open_step
    for pool in state.all_pools:
        state.loops[settle_until](pool.arrays, unsettled - 1)


def abort(state: SpaceState, ledger: StepLedger, step_id: StepId) -> AbortedSteps:
    """Abort a step in flight and all later ones, and take their effects back.

    Blocks that were never computed leave the prefix index; rows compute again what was planned for them. A row is lost
    if the aborted steps leave its memory undefined: it shares what another row was to compute, its blocks were to be
    copied or swapped, or a recurrent state was being advanced in place.
    """
    ledger.require_in_flight(step_id)
    with state.changing:
        aborted = ledger.abort(step_id)
        if state.receipts is not None:
            for step in aborted:
                state.receipts.aborted(step)
        for tell in state.observers.aborted:
            for step in aborted:
                tell(step)
        first = step_id - state.num_steps_before
        moved = _moved_blocks(state, ledger, aborted)
        tickets = undefined_tickets(state, first, {name: on_device for name, (on_device, _) in moved.items()})
        settle(state, ledger)
        for pool in state.all_pools:
            withdraw_since(pool.arrays, first)
        if state.checkpoints is not None and state.checkpoints.inside:
            end_inside(state, {step.plan.step_id for step in aborted})
        lost = _lost_rows(state, moved, aborted)
        rewound = _rewind_rows(state, aborted, lost)
        if state.is_overlapped:
            drop_unsampled(state, rewound)
        if state.counts_epochs:
            undate_rewound(state, rewound)
        stranded = _stranded(state, rewound)
        lost |= stranded
        _declare_lost(state, lost)
        _mark_tables_changed(state, aborted)
        renew_new_blocks(state, ledger, aborted)
        uncomputed = (state.rows[:, STATUS] == RUNNING) & (state.rows[:, NUM_PLANNED] < state.rows[:, NUM_TOKENS])
        running = np.flatnonzero(uncomputed).astype(np.int32)
        for group in state.all_groups:
            renew_pending(*group.view, running, first)
        publish(state, ledger, running)
        ids = tuple(step.plan.step_id for step in aborted)
        return AbortedSteps(
            ids, tuple(Row(row) for row in rewound if row not in lost), tuple(map(Row, sorted(lost))), tickets
        )


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
    for group in state.all_groups:
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
                state.rows[row, group.planned] = min(state.rows[row, group.planned], start)
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
        if state.rows[row, group.planned] < state.rows[row, group.positions] and num_tokens[row] <= planned[row]
    }


def _mark_tables_changed(state: SpaceState, aborted: list[InFlightStep]) -> None:
    """Mark the table entries of running rows that aborted plans carried as changed, for the next plan."""
    for writes in (writes for step in aborted for writes in step.plan.table_writes):
        table = state.tables[writes.group].arrays
        at, num_slots = int(table.parameters[AT]), int(table.parameters[NUM_DRAFT_STATES])
        is_second = writes.group >= len(state.all_groups)
        for row in writes.rows.tolist():
            if state.rows[row, STATUS] == RUNNING:
                note_change(state.rows, row, at, 0, num_slots if is_second else int(state.rows[row, at + NUM_BLOCKS]))


def _declare_lost(state: SpaceState, lost: set[int]) -> None:
    for row in lost:
        state.rows[row, STATUS] = LOST if state.rows[row, STATUS] == RUNNING else LOST_ON_HOST


@compiled
def renew_pending(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, step: int) -> None:
    """Make the blocks that rewound rows will compute again pending for the open step, and unpublished.

    Blocks that were computed before ``step``, the first that was aborted, stay computed, even if a row was to compute
    them again.
    """
    at = group.parameters[AT]
    for row in batch:
        first = rows[row, group.parameters[PLANNED]] // group.parameters[BLOCK_SIZE]
        for index in range(first, rows[row, at + NUM_BLOCKS]):
            block = group.table[row, index]
            if block != NULL_BLOCK and pool.records[block, PENDING_STEP] >= step:
                pool.records[block, PENDING_STEP] = pool.counts[OPEN_STEP]
        if rows[row, at + NUM_PUBLISHED] > first:
            rows[row, at + NUM_PUBLISHED] = first
            rewind_tail(pool, group, rows, row)
        touch(rows, row)


@compiled
def find_holders(group: GroupArrays, rows: Int32Array, status: int, is_wanted: BoolArray, is_holder: BoolArray) -> None:
    """Mark, in ``is_holder[row]``, the rows of one status that hold any block of ``is_wanted[block]``."""
    for row in range(len(rows)):
        if rows[row, STATUS] != status:
            continue
        for index in range(rows[row, group.parameters[AT] + NUM_BLOCKS]):
            if is_wanted[group.table[row, index]]:
                is_holder[row] = True
                break


@compiled
def renew_new(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, is_concerned: BoolArray
) -> None:
    """Make blocks that aborted plans allocated new again, if their row counts no content in them as computed.

    ``is_concerned[block]`` marks these blocks.
    """
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        first = blocks_for(rows[row, group.parameters[PLANNED]], block_size)
        for index in range(first, rows[row, group.parameters[AT] + NUM_BLOCKS]):
            block = group.table[row, index]
            if block != NULL_BLOCK and is_concerned[block]:
                pool.records[block, QUEUE] = NEW
