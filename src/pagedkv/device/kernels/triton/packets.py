"""Packets on a GPU: pulled out of pinned memory, and indexed, so that the step's kernel needs no order.

One kernel does both. Most of its programs copy; the others note for each row which entries are new and at which place
of the batch it stands, and fetch the words that they need over the bus themselves, so that nobody waits for anybody.
Sizes are read from the packet, so that a CUDA graph holds it all.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from pagedkv.device.kernels.triton.overlapping import may_overlap
from pagedkv.device.kernels.triton.words import (
    ALIGNMENT,
    ARE_DECODES,
    ARE_SINGLE,
    ENTRIES_AT,
    ENTRIES_LINE,
    LAST_WORDS,
    LENGTH,
    NO_FIRST,
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
    RANGES_AT,
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

COPY_PROGRAMS = 24
COPY_TILE = 1024
ROW_TILE = 1024
ROWS_A_BLOCK = 16
"""Of so many rows that compute a token, one begins a block."""
MOST_GUESSED = 8192
"""Words that a program fetches on a guess."""


def pull_packet(arrays: TableArrays) -> None:
    """As :func:`pagedkv.device.kernels.reference.tables.pull_packet`."""
    _pull_kernel[(2 * arrays.num_tables + 1 + COPY_PROGRAMS,)](
        arrays.ring,
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
        arrays.firsts,
        num_tables=arrays.num_tables,
        max_rows=arrays.max_rows,
        depth=arrays.sample_steps.shape[1],
        num_buffers=arrays.ring.shape[0],
        buffer_words=arrays.ring.shape[1],
        directory_words=arrays.directory_words,
        draft_line=arrays.draft_line,
        ROW_TILE=min(ROW_TILE, triton.next_power_of_2(arrays.max_rows)),
        DIRECTORY_TILE=triton.next_power_of_2(arrays.directory_words),
        RUN_TILE=triton.next_power_of_2(3 * max(8, arrays.max_rows // ROWS_A_BLOCK)),
        RANGE_TILE=min(MOST_GUESSED, triton.next_power_of_2(3 * arrays.max_rows)),
        COPY_PROGRAMS=COPY_PROGRAMS,
        COPY_TILE=COPY_TILE,
        OVERLAPS=may_overlap(arrays.packet.device),
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
def _copy_words(
    buffer,
    packet,
    num_expected,
    program,
    begin: tl.constexpr,
    buffer_words: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_TILE: tl.constexpr,
):
    """Copy the words from ``begin`` on.

    Each way over the bus takes a microsecond, so as many words as the packet before had do not wait for their number.
    """
    first = begin + program * COPY_TILE
    at = first + tl.arange(0, COPY_TILE)
    is_expected = at < tl.where(first < num_expected, buffer_words, 0)
    words = tl.load(buffer + at, mask=is_expected, other=0)
    num_words = tl.load(buffer + NUM_WORDS)
    tl.store(packet + at, words, mask=is_expected)
    rest = tl.where(first < num_expected, first + COPY_PROGRAMS * COPY_TILE, first)
    for later in range(rest, num_words, COPY_PROGRAMS * COPY_TILE):
        at = later + tl.arange(0, COPY_TILE)
        tl.store(packet + at, tl.load(buffer + at, mask=at < num_words, other=0), mask=at < num_words)


@triton.jit
def _bring_guessed(
    buffer, packet, begin, count, directory_words: tl.constexpr, DIRECTORY_TILE: tl.constexpr, PART_TILE: tl.constexpr
):
    """Let this program copy the directory, and some words from where a part was in the packet before.

    A plan is mostly laid out as the one before, and then all that the program needs comes in one way over the bus.
    Whatever the guess is, what is copied is right: the same words that the copiers bring there.
    """
    at = tl.arange(0, DIRECTORY_TILE)
    words = tl.load(buffer + at, mask=at < directory_words, other=0)
    place = tl.arange(0, PART_TILE)
    part = tl.load(buffer + begin + place, mask=place < count, other=0)
    tl.store(packet + at, words, mask=at < directory_words)
    tl.store(packet + begin + place, part, mask=place < count)
    tl.debug_barrier()  # what other warps have stored is there


@triton.jit
def _bring_ranges(
    buffer,
    packet,
    clock,
    compute_line,
    unknown_line,
    starts_line,
    draft_line: tl.constexpr,
    directory_words: tl.constexpr,
    DIRECTORY_TILE: tl.constexpr,
    RANGE_TILE: tl.constexpr,
):
    """Let this program copy what is said of the rows that compute: these parts are the last ones of a packet."""
    guess = tl.load(clock + RANGES_AT)
    num_guessed = tl.minimum(tl.load(clock + LAST_WORDS) - guess, RANGE_TILE)
    _bring_guessed(buffer, packet, guess, num_guessed, directory_words, DIRECTORY_TILE, RANGE_TILE)
    _bring_part(buffer, packet, compute_line, 3, guess, num_guessed)
    _bring_part(buffer, packet, unknown_line, 2, guess, num_guessed)
    if starts_line > 0:
        _bring_part(buffer, packet, starts_line, 1, guess, num_guessed)
    if draft_line > 0:
        _bring_part(buffer, packet, draft_line, 1, guess, num_guessed)
    tl.debug_barrier()  # what other warps have stored is there


@triton.jit
def _bring_part(buffer, packet, line, num_arrays: tl.constexpr, guess, num_guessed):
    """Let this program copy a part, unless all of it is among the guessed words."""
    offset, _, stride = _part(packet, line)
    end = offset + num_arrays * stride
    first = tl.where((offset >= guess) & (end <= guess + num_guessed), end, offset)
    for word in range(first, end, 1024):
        at = word + tl.arange(0, 1024)
        tl.store(packet + at, tl.load(buffer + at, mask=at < end, other=0), mask=at < end)


@triton.jit
def _pull_kernel(
    ring,
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
    firsts,
    num_tables: tl.constexpr,
    max_rows: tl.constexpr,
    depth: tl.constexpr,
    num_buffers: tl.constexpr,
    buffer_words: tl.constexpr,
    directory_words: tl.constexpr,
    draft_line: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DIRECTORY_TILE: tl.constexpr,
    RUN_TILE: tl.constexpr,
    RANGE_TILE: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program for each table's runs, one for the ranges of all, one for those of each outsider, and copiers.

    The others fetch what they read by themselves, since nobody waits for anybody.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    program = tl.program_id(0)
    pulled = tl.load(clock + PULLED)
    now = pulled + 1
    buffer = ring + (pulled % num_buffers) * buffer_words
    if program < num_tables:
        line = tl.load(geometry + program * NUM_COLUMNS + RUNS_LINE)
        head = heads + program * NUM_HEADS
        guess = tl.load(head + RUNS_AT)
        num_before = tl.load(head + NUM_RUNS)
        num_guessed = tl.minimum(3 * ((num_before + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT), RUN_TILE)
        _bring_guessed(buffer, packet, guess, num_guessed, directory_words, DIRECTORY_TILE, RUN_TILE)
        _bring_part(buffer, packet, line, 3, guess, num_guessed)
        tl.debug_barrier()  # what other warps have stored is there
        _index_runs(
            packet,
            now,
            line,
            tl.load(geometry + program * NUM_COLUMNS + ENTRIES_LINE),
            run_of_row + program * max_rows * NUM_RUN_COLUMNS,
            run_stamps + program * max_rows,
            run_firsts + program * (max_rows + 1),
            extents + program * max_rows,
            head,
            ROW_TILE,
        )
    elif program <= 2 * num_tables:
        if program == num_tables:
            tl.store(clock + NOW, now)
        _index_ranges(
            buffer,
            packet,
            clock,
            now,
            program - num_tables - 1,
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
            num_tables,
            max_rows,
            depth,
            directory_words,
            draft_line,
            firsts,
            ROW_TILE,
            DIRECTORY_TILE,
            RANGE_TILE,
        )
    else:
        _copy_words(
            buffer,
            packet,
            tl.load(clock + LAST_WORDS),
            program - 2 * num_tables - 1,
            directory_words,
            buffer_words,
            COPY_PROGRAMS,
            COPY_TILE,
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
    source,
    buffer,
    clock,
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
    num_tables: tl.constexpr,
    max_rows: tl.constexpr,
    depth: tl.constexpr,
    directory_words: tl.constexpr,
    draft_line: tl.constexpr,
    firsts,
    ROW_TILE: tl.constexpr,
    DIRECTORY_TILE: tl.constexpr,
    RANGE_TILE: tl.constexpr,
):
    """Move ranges down by what was refused, and sum them up: those of all groups, or of one that begins elsewhere."""
    starts_line = tl.load(geometry + outsider * NUM_COLUMNS + STARTS_LINE, mask=outsider >= 0, other=0)
    if (outsider >= 0) & (starts_line == 0):
        return
    _bring_ranges(
        source,
        buffer,
        clock,
        compute_line,
        unknown_line,
        starts_line,
        draft_line,
        directory_words,
        DIRECTORY_TILE,
        RANGE_TILE,
    )
    offset, num_rows, stride = _part(buffer, compute_line)
    unknown, num_unknown, unknown_stride = _part(buffer, unknown_line)
    mine = tl.load(buffer + starts_line + OFFSET, mask=starts_line > 0, other=0)
    mine = tl.where(starts_line > 0, mine, offset + stride)
    if (draft_line > 0) & (outsider < 0):
        _index_draft_states(buffer, draft_line, firsts, max_rows, ROW_TILE)
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
        for group in tl.static_range(num_tables):
            limit = _limit_of(geometry, group, outsider, max_rows)
            tl.store(starts_out + group * max_rows + place, begin, mask=place < limit)
            tl.store(seq_lens + group * max_rows + place, end, mask=place < limit)
            tl.store(offsets + group * (max_rows + 1) + place, before, mask=place < limit)
        if outsider < 0:
            tl.store(places + row, place, mask=is_place)
            tl.store(place_stamps + row, now, mask=is_place)
        num_tokens += tl.sum(length, 0)
        num_long += tl.sum((is_place & (length != 1)).to(tl.int32), 0)
    for group in tl.static_range(num_tables):
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
def _index_draft_states(buffer, draft_line, firsts, max_rows: tl.constexpr, ROW_TILE: tl.constexpr):
    """Note from which position on each place's states are in slots."""
    offset, num_rows, _ = _part(buffer, draft_line)
    for first in range(0, max_rows, ROW_TILE):
        place = first + tl.arange(0, ROW_TILE)
        position = tl.load(buffer + offset + place, mask=place < num_rows, other=NO_FIRST)
        tl.store(firsts + place, position, mask=place < max_rows)


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
