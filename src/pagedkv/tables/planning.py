"""The end of a step's preparation: which positions it computes, and which table entries the device must write.

A plan's parts are written directly into its buffer (:mod:`pagedkv.plan_buffer`), one after the other.
"""

from pagedkv.blocks.block_record import hold_until, note_content
from pagedkv.blocks.blocks import IN_ORDER, NEW, OPEN_STEP, QUEUE
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.plan_buffer import ALIGNMENT, HEADER_WORDS, LENGTH, LINE_WORDS, NUM_WORDS, OFFSET
from pagedkv.tables.filling import first_unfilled, is_unfilled
from pagedkv.tables.row_record import clear_changes, note_step, plan_to, start_touching, untouch
from pagedkv.tables.rows import (
    AT,
    DIRTY_FROM,
    DIRTY_TO,
    NUM_ACCEPTED,
    NUM_COMMON,
    NUM_PER_GROUP,
    NUM_PLANNED,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    STATUS,
    TOUCHED,
    GroupArrays,
)

__all__ = [
    "collect_firsts",
    "collect_new",
    "collect_ranges",
    "collect_starts",
    "collect_touched",
    "collect_unknown",
    "collect_writes",
]


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
        untouch(rows, place)
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
    start_touching(rows)
    return len(out) - first, ascends, num_ranges


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
            note_step(rows, index, step)
            plan_to(rows, index, NUM_PLANNED, end)
            place += 1
    return offset


@compiled
def collect_starts(
    group: GroupArrays, rows: Int32Array, buffer: Int32Array, line: int, ranges: int, num_ranges: int
) -> None:
    """Write the starts of all ranges in a group outside prefix caching, and record that these are planned.

    ``ranges`` is where :func:`collect_ranges` has put the rows.
    """
    planned = group.parameters[PLANNED]
    offset = place_part(buffer, line, 1, num_ranges)
    for place in range(num_ranges):
        row = buffer[ranges + place]
        buffer[offset + place] = rows[row, planned]
        plan_to(rows, row, planned, rows[row, NUM_TOKENS])


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
            note_content(records, block)
            if not counts[IN_ORDER]:
                hold_until(records, block, counts[OPEN_STEP])  # the plan may have it cleared
            buffer[offset + length] = block
            length += 1
    place_part(buffer, line, 1, length)
