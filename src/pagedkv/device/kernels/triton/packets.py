"""Packets on a GPU: pulled out of pinned memory, and indexed, so that the step's kernel needs no order.

The first kernel copies the packet over the bus, the second notes for each row which entries are new and at which place
of the batch it stands. (As one kernel, which reads everything over the bus twice or waits for itself, they took one to
four microseconds longer.) Sizes are read from the packet, so that a CUDA graph holds both.
"""

import triton
import triton.language as tl

from pagedkv.device.kernels.triton.words import (
    ALIGNMENT,
    ARE_DECODES,
    ARE_SINGLE,
    ENTRIES_AT,
    ENTRIES_LINE,
    LENGTH,
    NOW,
    NUM_COLUMNS,
    NUM_ENTRIES,
    NUM_HEADS,
    NUM_ROWS,
    NUM_RUN_COLUMNS,
    NUM_RUNS,
    NUM_TOKENS,
    NUM_WORDS,
    OFFSET,
    PADDED_TO,
    PULLED,
    ROWS_AT,
    RUN_COUNT,
    RUN_FIRST,
    RUN_START,
    RUNS_AT,
    RUNS_LINE,
    STARTS_LINE,
    STEP_HIGH,
    STEP_LOW,
)
from pagedkv.device.table_arrays import TableArrays

__all__ = ["pull_packet", "step_of"]

ROW_TILE = 1024
COPY_PROGRAMS = 24
EAGER_PROGRAMS = 8
"""Programs that copy their words before anybody knows how many there are: a step of 1,024 decodes fills four."""
COPY_TILE = 1024


def pull_packet(arrays: TableArrays) -> None:
    """As :func:`pagedkv.device.kernels.reference.tables.pull_packet`."""
    _pull_kernel[(COPY_PROGRAMS,)](
        arrays.ring,
        arrays.packet,
        arrays.clock,
        num_buffers=arrays.ring.shape[0],
        buffer_words=arrays.ring.shape[1],
        COPY_PROGRAMS=COPY_PROGRAMS,
        EAGER_PROGRAMS=EAGER_PROGRAMS,
        COPY_TILE=COPY_TILE,
        num_warps=8,
    )
    _index_kernel[(2 * arrays.num_groups + 1,)](
        arrays.packet,
        arrays.clock,
        arrays.geometry,
        arrays.run_of_row,
        arrays.run_stamps,
        arrays.run_firsts,
        arrays.places,
        arrays.place_stamps,
        arrays.extents,
        arrays.starts,
        arrays.seq_lens,
        arrays.offsets,
        arrays.heads,
        arrays.sample_steps,
        arrays.sample_refused,
        arrays.compute_line,
        arrays.unknown_line,
        num_groups=arrays.num_groups,
        max_rows=arrays.max_rows,
        depth=arrays.sample_steps.shape[1],
        ROW_TILE=min(ROW_TILE, triton.next_power_of_2(arrays.max_rows)),
        num_warps=8,
    )


@triton.jit
def _part(buffer, line):
    """Where the words of a part begin, how many there are, and how far apart the arrays of the part lie."""
    length = tl.load(buffer + line + LENGTH)
    return tl.load(buffer + line + OFFSET), length, (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@triton.jit
def step_of(buffer):
    """Step id of a packet; 0 where calls brought it."""
    low = tl.load(buffer + STEP_LOW).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(buffer + STEP_HIGH).to(tl.int64) << 32) + low


@triton.jit
def _pull_kernel(
    ring,
    packet,
    clock,
    num_buffers: tl.constexpr,
    buffer_words: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    EAGER_PROGRAMS: tl.constexpr,
    COPY_TILE: tl.constexpr,
):
    """Copy the packet. Each way over the bus takes a microsecond, so the first words do not wait for their number."""
    program = tl.program_id(0)
    buffer = ring + (tl.load(clock + PULLED) % num_buffers) * buffer_words
    at = program * COPY_TILE + tl.arange(0, COPY_TILE)
    if program < EAGER_PROGRAMS:
        tl.store(packet + at, tl.load(buffer + at, mask=at < buffer_words, other=0), mask=at < buffer_words)
    else:
        num_words = tl.load(buffer + NUM_WORDS)
        for first in range(program * COPY_TILE, num_words, (COPY_PROGRAMS - EAGER_PROGRAMS) * COPY_TILE):
            at = first + tl.arange(0, COPY_TILE)
            tl.store(packet + at, tl.load(buffer + at, mask=at < num_words, other=0), mask=at < num_words)


@triton.jit
def _index_kernel(
    packet,
    clock,
    geometry,
    run_of_row,
    run_stamps,
    run_firsts,
    places,
    place_stamps,
    extents,
    starts_out,
    seq_lens,
    offsets,
    heads,
    sample_steps,
    sample_refused,
    compute_line,
    unknown_line,
    num_groups: tl.constexpr,
    max_rows: tl.constexpr,
    depth: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """One program for each group's runs, one for the ranges of all groups, and one for those of each outsider."""
    program = tl.program_id(0)
    now = tl.load(clock + PULLED) + 1
    if program < num_groups:
        _index_runs(
            packet,
            now,
            tl.load(geometry + program * NUM_COLUMNS + RUNS_LINE),
            tl.load(geometry + program * NUM_COLUMNS + ENTRIES_LINE),
            run_of_row + program * max_rows * NUM_RUN_COLUMNS,
            run_stamps + program * max_rows,
            run_firsts + program * (max_rows + 1),
            extents + program * max_rows,
            heads + program * NUM_HEADS,
            ROW_TILE,
        )
    else:
        if program == num_groups:
            tl.store(clock + NOW, now)
        _index_ranges(
            packet,
            now,
            program - num_groups - 1,
            compute_line,
            unknown_line,
            geometry,
            places,
            place_stamps,
            starts_out,
            seq_lens,
            offsets,
            heads,
            sample_steps,
            sample_refused,
            num_groups,
            max_rows,
            depth,
            ROW_TILE,
        )


@triton.jit
def _index_runs(
    buffer,
    now,
    line,
    entries_line,
    run_of_row,
    run_stamps,
    run_firsts,
    extents,
    head,
    ROW_TILE: tl.constexpr,
):
    """Note for each row which entries the packet brings."""
    offset, num_runs, stride = _part(buffer, line)
    entries_at = tl.load(buffer + entries_line + OFFSET)
    step_id = step_of(buffer)
    num_entries = 0
    num_odd = 0
    for first in range(0, num_runs, ROW_TILE):
        run = first + tl.arange(0, ROW_TILE)
        is_run = run < num_runs
        row = tl.load(buffer + offset + run, mask=is_run, other=0)
        start = tl.load(buffer + offset + stride + run, mask=is_run, other=0)
        count = tl.load(buffer + offset + 2 * stride + run, mask=is_run, other=0)
        before = num_entries + tl.cumsum(count, 0) - count
        tl.store(run_firsts + run, before, mask=is_run)
        told = run_of_row + row * NUM_RUN_COLUMNS
        tl.store(told + RUN_START, start, mask=is_run)
        tl.store(told + RUN_COUNT, count, mask=is_run)
        tl.store(told + RUN_FIRST, before, mask=is_run)
        tl.store(run_stamps + row, now, mask=is_run)
        known = tl.load(extents + row, mask=is_run, other=0)
        is_anew = start + step_id == 0  # of a call; a plan may mean a change there alone
        tl.store(extents + row, tl.maximum(tl.where(is_anew, 0, known), start + count), mask=is_run)
        num_entries += tl.sum(count, 0)
        num_odd += tl.sum((is_run & (count != 1)).to(tl.int32), 0)
    tl.store(head + NUM_RUNS, num_runs)
    tl.store(head + RUNS_AT, offset)
    tl.store(head + NUM_ENTRIES, num_entries)
    tl.store(head + ENTRIES_AT, entries_at)
    tl.store(head + ARE_SINGLE, tl.where(num_odd == 0, 1, 0))


@triton.jit
def _index_ranges(
    buffer,
    now,
    outsider,
    compute_line,
    unknown_line,
    geometry,
    places,
    place_stamps,
    starts_out,
    seq_lens,
    offsets,
    heads,
    sample_steps,
    sample_refused,
    num_groups: tl.constexpr,
    max_rows: tl.constexpr,
    depth: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """Move ranges down by what was refused, and sum them up: those of all groups, or of one that begins elsewhere."""
    starts_line = tl.load(geometry + outsider * NUM_COLUMNS + STARTS_LINE, mask=outsider >= 0, other=0)
    if (outsider >= 0) & (starts_line == 0):
        return
    offset, num_rows, stride = _part(buffer, compute_line)
    unknown, num_unknown, unknown_stride = _part(buffer, unknown_line)
    mine = tl.load(buffer + starts_line + OFFSET, mask=starts_line > 0, other=0)
    mine = tl.where(starts_line > 0, mine, offset + stride)
    step_id = step_of(buffer)
    num_tokens = 0
    num_long = 0
    for first in range(0, max_rows, ROW_TILE):
        place = first + tl.arange(0, ROW_TILE)
        is_place = place < num_rows
        row = tl.load(buffer + offset + place, mask=is_place, other=0)
        start = tl.load(buffer + offset + stride + place, mask=is_place, other=0)
        end = tl.load(buffer + offset + 2 * stride + place, mask=is_place, other=0)
        begin = start
        if starts_line > 0:
            begin = tl.load(buffer + mine + place, mask=is_place, other=0)
        shift = tl.zeros_like(row)
        if num_unknown > 0:
            shift = _refused(
                buffer + unknown, unknown_stride, place, is_place, row, step_id, sample_steps, sample_refused, depth
            )
        begin = tl.where(begin == start, start - shift, begin)
        end = end - shift
        length = tl.maximum(end - begin, 0)
        before = num_tokens + tl.cumsum(length, 0) - length
        for group in tl.static_range(num_groups):
            limit = _limit_of(geometry, group, outsider, max_rows)
            tl.store(starts_out + group * max_rows + place, begin, mask=place < limit)
            tl.store(seq_lens + group * max_rows + place, end, mask=place < limit)
            tl.store(offsets + group * (max_rows + 1) + place, before, mask=place < limit)
        if outsider < 0:
            tl.store(places + row, place, mask=is_place)
            tl.store(place_stamps + row, now, mask=is_place)
        num_tokens += tl.sum(length, 0)
        num_long += tl.sum((is_place & (length != 1)).to(tl.int32), 0)
    for group in tl.static_range(num_groups):
        is_theirs = _limit_of(geometry, group, outsider, max_rows) > 0
        head = heads + group * NUM_HEADS
        num_before = tl.load(head + NUM_TOKENS)
        tl.store(offsets + group * (max_rows + 1) + max_rows, num_tokens, mask=is_theirs)
        tl.store(head + PADDED_TO, tl.maximum(num_tokens, num_before), mask=is_theirs)
        tl.store(head + NUM_TOKENS, num_tokens, mask=is_theirs)
        tl.store(head + NUM_ROWS, num_rows, mask=is_theirs)
        tl.store(head + ROWS_AT, offset, mask=is_theirs)
        tl.store(head + ARE_DECODES, tl.where(num_long == 0, 1, 0), mask=is_theirs)


@triton.jit
def _limit_of(geometry, group, outsider, max_rows):
    """Places for which a program tells a group's ranges: all or none. Outsiders have programs of their own."""
    their_line = tl.load(geometry + group * NUM_COLUMNS + STARTS_LINE)
    return tl.where(tl.where(outsider < 0, their_line == 0, group == outsider), max_rows, 0)


@triton.jit
def _refused(unknown, stride, place, is_place, row, step_id, sample_steps, sample_refused, depth: tl.constexpr):
    """As in the reference: from the row's last step that is not after the one that the plan names."""
    count = tl.load(unknown + place, mask=is_place, other=0)
    steps_back = tl.load(unknown + stride + place, mask=is_place, other=0)
    concerns = is_place & (count > 0) & (steps_back > 0)
    named = step_id - steps_back
    sampler = tl.zeros_like(named) - 1
    for entry in tl.static_range(depth):
        step = tl.load(sample_steps + row * depth + entry, mask=concerns, other=-1)
        sampler = tl.where(step <= named, tl.maximum(sampler, step), sampler)
    sampler = tl.where(sampler < 0, named, sampler)
    shift = tl.zeros_like(row)
    for entry in tl.static_range(depth):
        step = tl.load(sample_steps + row * depth + entry, mask=concerns, other=-1)
        refused = tl.load(sample_refused + row * depth + entry, mask=concerns, other=0)
        shift += tl.where((step >= sampler) & (step < step_id), refused, 0)
    return tl.where(concerns, shift, 0)
