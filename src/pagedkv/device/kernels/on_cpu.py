"""The kernels on a CPU: those in plain torch, but for block tables, whose many small operations are two compiled loops.

On a CPU a call of torch takes microseconds and moves a few numbers here: a step of eight rows took 60 to 100 calls a
group. The loops do what :func:`~pagedkv.device.kernels.reference.pull_packet` and
:func:`~pagedkv.device.kernels.reference.step_tables` define.
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.device.kernels.reference import (
    attend_rows,
    copy_blocks,
    draw_tokens,
    find_least,
    gather_rows,
    list_work,
    map_slots,
    noise_words,
    read_states,
    write_states,
    write_tokens,
    zero_blocks,
)
from pagedkv.device.table_arrays import (
    ARE_DECODES,
    ARE_SINGLE,
    BASE,
    BLOCK_SIZE,
    ENDS_LINE,
    ENTRIES_AT,
    ENTRIES_LINE,
    HAS_SLOTS,
    LAST_WORDS,
    NO_FIRST,
    NOW,
    NUM_ENTRIES,
    NUM_RANGES,
    NUM_ROWS,
    NUM_RUNS,
    NUM_TOKENS,
    PADDED_TO,
    PULLED,
    RANGES_AT,
    ROWS_AT,
    RUN_COUNT,
    RUN_FIRST,
    RUN_START,
    RUNS_AT,
    RUNS_LINE,
    STARTS_LINE,
    UNKNOWN_AT,
    UNKNOWNS_AT,
    WIDTH,
    TableArrays,
)
from pagedkv.plan_buffer import ALIGNMENT, LENGTH, NUM_WORDS, OFFSET, STEP_HIGH, STEP_LOW

__all__ = [
    "attend_rows",
    "copy_blocks",
    "draw_tokens",
    "find_least",
    "gather_rows",
    "list_work",
    "map_slots",
    "noise_words",
    "pull_packet",
    "read_states",
    "step_tables",
    "write_states",
    "write_tokens",
    "zero_blocks",
]

LOW_WORD: Final = 0xFFFF_FFFF
NO_SLOT: Final = -1
NO_ROW: Final = -1


class TableMemory(NamedTuple):
    """The arrays of :class:`~pagedkv.device.table_arrays.TableArrays` by the same names, as NumPy sees their memory."""

    ring: Int32Array
    packet: Int32Array
    clock: Int64Array
    geometry: Int64Array
    tables: Int32Array
    batch_tables: Int32Array
    run_of_row: Int32Array
    run_stamps: Int64Array
    run_firsts: Int32Array
    places: Int32Array
    place_stamps: Int64Array
    extents: Int32Array
    changed: Int64Array
    held_rows: Int32Array
    held_extents: Int32Array
    held_stamps: Int64Array
    starts: Int32Array
    seq_lens: Int32Array
    offsets: Int32Array
    heads: Int32Array
    firsts: Int32Array
    sample_steps: Int64Array
    sample_ends: Int32Array
    sample_refused: Int32Array
    sample_counts: Int32Array
    slots: Int64Array


def pull_packet(arrays: TableArrays) -> None:
    """Copy the next packet, and index each row's parts of it. O(packet + rows)."""
    _pull(_memory(arrays), arrays.compute_line, arrays.unknown_line, arrays.draft_line)


def step_tables(arrays: TableArrays, *, writes_only: bool = False) -> None:
    """Apply the pulled packet: entries, batch order, slots; with ``writes_only`` the entries by row alone.

    Cost: O(entries + tokens + rows), and the whole table of each row that is new at its place in the batch.
    """
    _step(_memory(arrays), arrays.compute_line, writes_only)


def _memory(arrays: TableArrays) -> TableMemory:
    return TableMemory(*(getattr(arrays, name).numpy() for name in TableMemory._fields))


@inlined
def _at(memory: TableMemory, line: int, place: int) -> int:
    """Return where an array of a part of the packet begins: the one at ``place`` among those of its line."""
    padded = -(-memory.packet[line + LENGTH] // ALIGNMENT) * ALIGNMENT
    return int(memory.packet[line + OFFSET] + place * padded)


@inlined
def _step_id(memory: TableMemory) -> int:
    return int((np.int64(memory.packet[STEP_HIGH]) << 32) + (np.int64(memory.packet[STEP_LOW]) & LOW_WORD))


@compiled
def _pull(memory: TableMemory, compute_line: int, unknown_line: int, draft_line: int) -> None:
    buffer = memory.clock[PULLED] % len(memory.ring)
    for word in range(memory.ring[buffer, NUM_WORDS]):
        memory.packet[word] = memory.ring[buffer, word]
    memory.clock[NOW] = memory.clock[PULLED] + 1
    for group in range(len(memory.geometry)):
        _index_runs(memory, group)
        _index_ranges(memory, group, compute_line, unknown_line)
    if draft_line:
        first, count = _at(memory, draft_line, 0), memory.packet[draft_line + LENGTH]
        for place in range(len(memory.firsts)):
            memory.firsts[place] = memory.packet[first + place] if place < count else NO_FIRST


@inlined
def _index_runs(memory: TableMemory, group: int) -> None:
    packet, line, head = memory.packet, memory.geometry[group, RUNS_LINE], memory.heads[group]
    num_runs, is_call = packet[line + LENGTH], _step_id(memory) == 0
    rows, starts, counts = _at(memory, line, 0), _at(memory, line, 1), _at(memory, line, 2)
    total, are_single = 0, True
    for run in range(num_runs):
        row, start, count = packet[rows + run], packet[starts + run], packet[counts + run]
        memory.run_firsts[group, run] = total
        memory.run_of_row[group, row, RUN_START] = start
        memory.run_of_row[group, row, RUN_COUNT] = count
        memory.run_of_row[group, row, RUN_FIRST] = total
        memory.run_stamps[group, row] = memory.clock[NOW]
        # A run at the first entry replaces the whole row if it is from a call; from a plan, it may change only that.
        before = 0 if is_call and start == 0 else memory.extents[group, row]
        memory.extents[group, row] = max(before, start + count)
        total += count
        are_single = are_single and count == 1
    memory.run_firsts[group, num_runs:] = total
    head[NUM_RUNS], head[RUNS_AT], head[NUM_ENTRIES] = num_runs, rows, total
    head[ENTRIES_AT] = packet[memory.geometry[group, ENTRIES_LINE] + OFFSET]
    head[ARE_SINGLE] = are_single


@inlined
def _index_ranges(memory: TableMemory, group: int, compute_line: int, unknown_line: int) -> None:
    packet, line, head = memory.packet, memory.geometry[group, STARTS_LINE], memory.heads[group]
    num_rows, has_unknown = packet[compute_line + LENGTH], packet[unknown_line + LENGTH] > 0
    rows, common, ends = _at(memory, compute_line, 0), _at(memory, compute_line, 1), _at(memory, compute_line, 2)
    ends_line = memory.geometry[group, ENDS_LINE]
    mine, own_ends = _at(memory, line, 0) if line else common, _at(memory, ends_line, 0) if ends_line else ends
    total, are_decodes = 0, True
    for place in range(num_rows):
        row, start = packet[rows + place], packet[mine + place]
        moves = has_unknown and not ends_line  # an encoder's tokens are all known
        shift = _refused(memory, unknown_line, place, row, packet[common + place]) if moves else 0
        begin = start - shift if start == packet[common + place] else start
        end = packet[own_ends + place] - shift
        length = max(end - begin, 0)
        memory.starts[group, place], memory.seq_lens[group, place] = begin, end
        memory.offsets[group, place] = total
        total += length
        are_decodes = are_decodes and length == 1
        if group == 0:
            memory.places[row], memory.place_stamps[row] = place, memory.clock[NOW]
    memory.starts[group, num_rows:] = 0
    memory.seq_lens[group, num_rows:] = 0
    memory.offsets[group, num_rows:] = total
    head[NUM_ROWS], head[ROWS_AT], head[UNKNOWNS_AT] = num_rows, rows, packet[unknown_line + OFFSET]
    head[PADDED_TO] = max(total, head[NUM_TOKENS])
    head[NUM_TOKENS] = total
    head[ARE_DECODES] = are_decodes


@inlined
def _refused(memory: TableMemory, unknown_line: int, place: int, row: int, start: int) -> int:
    """Count the tokens by which a range moves down: see the kernel in plain torch."""
    packet = memory.packet
    if packet[_at(memory, unknown_line, 0) + place] <= 0 or packet[_at(memory, unknown_line, 1) + place] <= 0:
        return 0
    last, left_off = -1, 0
    for entry in range(memory.sample_steps.shape[1]):
        step = memory.sample_steps[row, entry]
        if last < step < _step_id(memory):
            last, left_off = step, memory.sample_ends[row, entry] - memory.sample_refused[row, entry]
    return max(start - left_off, 0) if last >= 0 else 0


@compiled
def _step(memory: TableMemory, compute_line: int, writes_only: bool) -> None:  # noqa: FBT001 - a flag of a loop
    rows, num_rows = _at(memory, compute_line, 0), memory.packet[compute_line + LENGTH]
    for group in range(len(memory.geometry)):
        _write_entries(memory, group, writes_only)
        if not writes_only:
            _refresh_batch(memory, group, rows, num_rows)
            _write_slots(memory, group, rows, num_rows)
    if not writes_only:
        for place in range(num_rows):
            row = memory.packet[rows + place]
            cursor = memory.sample_counts[row] % memory.sample_steps.shape[1]
            memory.sample_steps[row, cursor] = _step_id(memory)
            memory.sample_ends[row, cursor] = memory.seq_lens[0, place]
            memory.sample_refused[row, cursor] = 0
            memory.sample_counts[row] += 1
    clock, head = memory.clock, memory.heads[0]
    clock[PULLED], clock[LAST_WORDS] = clock[NOW], memory.packet[NUM_WORDS]
    clock[RANGES_AT], clock[NUM_RANGES], clock[UNKNOWN_AT] = head[ROWS_AT], head[NUM_ROWS], head[UNKNOWNS_AT]


@inlined
def _write_entries(memory: TableMemory, group: int, writes_only: bool) -> None:  # noqa: FBT001 - as above
    packet, line = memory.packet, memory.geometry[group, RUNS_LINE]
    base, width = memory.geometry[group, BASE], memory.geometry[group, WIDTH]
    rows, starts, counts = _at(memory, line, 0), _at(memory, line, 1), _at(memory, line, 2)
    entries = _at(memory, memory.geometry[group, ENTRIES_LINE], 0)
    for run in range(packet[line + LENGTH]):
        row, start = packet[rows + run], packet[starts + run]
        is_in_batch = not writes_only and memory.place_stamps[row] == memory.clock[NOW]
        if not is_in_batch:
            memory.changed[group, row] = memory.clock[NOW]
        for index in range(start, start + packet[counts + run]):
            memory.tables[base + row * width + index] = packet[entries]
            if is_in_batch:
                memory.batch_tables[base + memory.places[row] * width + index] = packet[entries]
            entries += 1


@inlined
def _refresh_batch(memory: TableMemory, group: int, rows: int, num_rows: int) -> None:
    """Copy the rows that are new at their places, or were changed while they were out of the batch."""
    base, width = memory.geometry[group, BASE], memory.geometry[group, WIDTH]
    held, stamps = memory.held_rows[group], memory.held_stamps[group]
    for place in range(len(held)):
        there = memory.batch_tables[base + place * width : base + (place + 1) * width]
        if place >= num_rows:
            if held[place] >= 0:
                there[:] = 0
            held[place], memory.held_extents[group, place] = NO_ROW, 0
            continue
        row = memory.packet[rows + place]
        extent = memory.extents[group, row]
        if held[place] != row or memory.changed[group, row] > stamps[place]:
            for index in range(width):
                there[index] = memory.tables[base + row * width + index] if index < extent else 0
        held[place], memory.held_extents[group, place], stamps[place] = row, extent, memory.clock[NOW]


@inlined
def _write_slots(memory: TableMemory, group: int, rows: int, num_rows: int) -> None:
    head, slots = memory.heads[group], memory.slots[group]
    slots[head[NUM_TOKENS] : head[PADDED_TO]] = NO_SLOT
    if not memory.geometry[group, HAS_SLOTS]:
        return
    base, width = memory.geometry[group, BASE], memory.geometry[group, WIDTH]
    block_size = memory.geometry[group, BLOCK_SIZE]
    for place in range(num_rows):
        table = base + memory.packet[rows + place] * width
        position = memory.starts[group, place]
        for token in range(memory.offsets[group, place], memory.offsets[group, place + 1]):
            slots[token] = memory.tables[table + position // block_size] * block_size + position % block_size
            position += 1
