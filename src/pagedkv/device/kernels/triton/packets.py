"""Packets on a GPU: pulled from pinned memory and indexed, so that programs of the step's kernel may run in any order.

One kernel does both. Most of its programs copy; the others index each row's new entries and place in the batch. They
read the words that they need over the bus themselves, so that no program waits for another. Each access over the bus
takes a microsecond. A plan's layout is mostly that of the previous plan. So words are read at their place in the
previous packet, together with the line of the directory that has their actual place; if that differs, they are read
again. Sizes are read from the packet, so that one CUDA graph can be used for all packets.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from pagedkv.device.kernels.triton.overlapping import may_overlap
from pagedkv.device.kernels.triton.words import (
    ALIGNMENT,
    ARE_DECODES,
    ARE_SINGLE,
    ENDS_LINE,
    ENTRIES_AT,
    ENTRIES_LINE,
    LAST_WORDS,
    NO_FIRST,
    NOW,
    NUM_COLUMNS,
    NUM_ENTRIES,
    NUM_HEADS,
    NUM_RANGES,
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
    STEP_LOW,
    UNKNOWN_AT,
    UNKNOWNS_AT,
)
from pagedkv.device.table_arrays import TableArrays

COPY_PROGRAMS = 24
COPY_TILE = 1024
ROW_TILE = 1024


def pull_packet(arrays: TableArrays) -> None:
    """As :func:`pagedkv.device.kernels.reference.pull_packet`."""
    _pull_kernel[(2 * arrays.num_tables + COPY_PROGRAMS,)](
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
        arrays.sample_ends,
        arrays.sample_refused,
        arrays.compute_line,
        arrays.unknown_line,
        arrays.firsts,
        num_tables=arrays.num_tables,
        max_rows=arrays.max_rows,
        depth=arrays.sample_steps.shape[1],
        num_buffers=arrays.ring.shape[0],
        buffer_words=arrays.ring.shape[1],
        draft_line=arrays.draft_line,
        ROW_TILE=min(ROW_TILE, triton.next_power_of_2(arrays.max_rows)),
        COPY_PROGRAMS=COPY_PROGRAMS,
        COPY_TILE=COPY_TILE,
        OVERLAPS=may_overlap(arrays.packet.device),
        num_warps=16,
    )


@triton.jit
def _pair(buffer, at):
    """Return two words at an even place, by one load, since each load over the bus takes time."""
    pair = tl.load((buffer + at).to(tl.pointer_type(tl.int64)))
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def _part(buffer, line):
    """Return beginning and number of the words of a part, and the distance of its arrays."""
    offset, length = _pair(buffer, line + OFFSET)
    return offset, length, _padded(length)


@triton.jit
def _padded(length):
    """Return the number of words from one array of a part to the next."""
    return (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@triton.jit
def step_of(buffer):
    """Return the step id of a packet; 0 for a packet of calls."""
    return tl.load((buffer + STEP_LOW).to(tl.pointer_type(tl.int64)))


@triton.jit
def _three(buffer, at, num_words, ROW_TILE: tl.constexpr):
    """Load the three arrays of a part at its guessed place."""
    at = tl.multiple_of(at, ALIGNMENT)
    place = tl.arange(0, ROW_TILE)
    stride = _padded(num_words)
    first = tl.load(buffer + at + place, mask=place < num_words, other=0)
    second = tl.load(buffer + at + stride + place, mask=place < num_words, other=0)
    third = tl.load(buffer + at + 2 * stride + place, mask=place < num_words, other=0)
    return first, second, third


@triton.jit
def _two(buffer, at, num_words, ROW_TILE: tl.constexpr):
    """As :func:`_three`, for a part with two arrays."""
    at = tl.multiple_of(at, ALIGNMENT)
    place = tl.arange(0, ROW_TILE)
    first = tl.load(buffer + at + place, mask=place < num_words, other=0)
    second = tl.load(buffer + at + _padded(num_words) + place, mask=place < num_words, other=0)
    return first, second


@triton.jit
def _words(buffer, at, place, num_words, guessed, num_guessed):
    """Return an array of a packet: the guessed words if they are right, else those of a second access over the bus."""
    at = tl.multiple_of(at, ALIGNMENT)
    fetched = tl.load(buffer + at + place, mask=(place < num_words) & (place >= num_guessed), other=0)
    return tl.where(place < num_guessed, guessed, fetched)


@triton.jit
def _copy_words(
    buffer,
    packet,
    num_expected,
    program,
    buffer_words: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_TILE: tl.constexpr,
):
    """Copy all words; the first ``num_expected`` without waiting for the packet's number of words."""
    first = program * COPY_TILE
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
    sample_ends,
    sample_refused,
    compute_line,
    unknown_line,
    firsts,
    num_tables: tl.constexpr,
    max_rows: tl.constexpr,
    depth: tl.constexpr,
    num_buffers: tl.constexpr,
    buffer_words: tl.constexpr,
    draft_line: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Run one program for each table's runs, one for its ranges, and programs that copy.

    The indexing programs read the packet's words themselves, since no program waits for another.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    program = tl.program_id(0)
    pulled = tl.load(clock + PULLED)
    now = pulled + 1
    buffer = ring + (pulled % num_buffers) * buffer_words
    if program < num_tables:
        _index_runs(
            buffer,
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
    elif program < 2 * num_tables:
        if program == num_tables:
            tl.store(clock + NOW, now)
        _index_ranges(
            buffer,
            clock,
            now,
            program - num_tables,
            compute_line,
            unknown_line,
            tl.load(geometry + (program - num_tables) * NUM_COLUMNS + STARTS_LINE),
            tl.load(geometry + (program - num_tables) * NUM_COLUMNS + ENDS_LINE),
            places,
            place_stamps,
            starts_out + (program - num_tables) * max_rows,
            seq_lens + (program - num_tables) * max_rows,
            offsets + (program - num_tables) * (max_rows + 1),
            heads + (program - num_tables) * NUM_HEADS,
            sample_steps,
            sample_ends,
            sample_refused,
            firsts,
            max_rows,
            depth,
            draft_line,
            ROW_TILE,
        )
    else:
        _copy_words(
            buffer,
            packet,
            tl.load(clock + LAST_WORDS),
            program - 2 * num_tables,
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
    """Index the entries of each row in the packet."""
    guess = tl.load(head + RUNS_AT)
    num_before = tl.load(head + NUM_RUNS)
    rows, starts, counts = _three(buffer, guess, num_before, ROW_TILE)
    offset, num_runs, stride = _part(buffer, line)
    entries_at = tl.load(buffer + entries_line + OFFSET)
    step_id = step_of(buffer)
    num_guessed = tl.where((offset == guess) & (num_runs == num_before), tl.minimum(num_runs, ROW_TILE), 0)
    num_entries = 0
    num_odd = 0
    for first in range(0, num_runs, ROW_TILE):
        run = first + tl.arange(0, ROW_TILE)
        is_run = run < num_runs
        row = _words(buffer, offset, run, num_runs, rows, num_guessed)
        start = _words(buffer, offset + stride, run, num_runs, starts, num_guessed)
        count = _words(buffer, offset + 2 * stride, run, num_runs, counts, num_guessed)
        before = num_entries + tl.cumsum(count, 0) - count
        tl.store(run_firsts + run, before, mask=is_run)
        run_record = run_of_row + row * NUM_RUN_COLUMNS
        tl.store(run_record + RUN_START, start, mask=is_run)
        tl.store(run_record + RUN_COUNT, count, mask=is_run)
        tl.store(run_record + RUN_FIRST, before, mask=is_run)
        tl.store(run_stamps + row, now, mask=is_run)
        known = tl.load(extents + row, mask=is_run, other=0)
        is_anew = start + step_id == 0  # in a call; a plan may change only that entry
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
    clock,
    now,
    group,
    compute_line,
    unknown_line,
    starts_line,
    ends_line,
    places,
    place_stamps,
    starts_out,
    seq_lens,
    offsets,
    head,
    sample_steps,
    sample_ends,
    sample_refused,
    firsts,
    max_rows: tl.constexpr,
    depth: tl.constexpr,
    draft_line: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """Move a group's ranges down by their refused tokens, and sum their lengths."""
    guess = tl.load(clock + RANGES_AT)
    unknown_guess = tl.load(clock + UNKNOWN_AT)
    num_before = tl.load(clock + NUM_RANGES)
    rows, starts, ends = _three(buffer, guess, num_before, ROW_TILE)
    counts, backs = _two(buffer, unknown_guess, tl.where(unknown_guess > 0, num_before, 0), ROW_TILE)
    offset, num_rows, stride = _part(buffer, compute_line)
    unknown, num_unknown, unknown_stride = _part(buffer, unknown_line)
    num_guessed = tl.where((offset == guess) & (num_rows == num_before), tl.minimum(num_rows, ROW_TILE), 0)
    num_unknown_guessed = tl.where(unknown == unknown_guess, tl.minimum(num_guessed, num_unknown), 0)
    mine = tl.load(buffer + starts_line + OFFSET, mask=starts_line > 0, other=0)
    own_ends = tl.load(buffer + ends_line + OFFSET, mask=ends_line > 0, other=0)
    if (draft_line > 0) & (group == 0):
        _index_draft_states(buffer, draft_line, firsts, max_rows, ROW_TILE)
    step_id = step_of(buffer)
    num_tokens = 0
    num_long = 0
    for first in range(0, max_rows, ROW_TILE):
        place = first + tl.arange(0, ROW_TILE)
        is_place = place < num_rows
        row = _words(buffer, offset, place, num_rows, rows, num_guessed)
        start = _words(buffer, offset + stride, place, num_rows, starts, num_guessed)
        end = _words(buffer, offset + 2 * stride, place, num_rows, ends, num_guessed)
        begin = start
        if starts_line > 0:
            begin = tl.load(buffer + mine + place, mask=is_place, other=0)
        shift = tl.zeros_like(row)
        if num_unknown > 0:
            count = _words(buffer, unknown, place, num_unknown, counts, num_unknown_guessed)
            steps_back = _words(buffer, unknown + unknown_stride, place, num_unknown, backs, num_unknown_guessed)
            shift = _refused(
                is_place, count, steps_back, row, start, step_id, sample_steps, sample_ends, sample_refused, depth
            )
        if ends_line > 0:  # an encoder's tokens are all known
            end = tl.load(buffer + own_ends + place, mask=is_place, other=0)
        else:
            begin = tl.where(begin == start, start - shift, begin)
            end = end - shift
        length = tl.maximum(end - begin, 0)
        before = num_tokens + tl.cumsum(length, 0) - length
        tl.store(starts_out + place, begin, mask=place < max_rows)
        tl.store(seq_lens + place, end, mask=place < max_rows)
        tl.store(offsets + place, before, mask=place < max_rows)
        if group == 0:
            tl.store(places + row, place, mask=is_place)
            tl.store(place_stamps + row, now, mask=is_place)
        num_tokens += tl.sum(length, 0)
        num_long += tl.sum((is_place & (length != 1)).to(tl.int32), 0)
    tl.store(offsets + max_rows, num_tokens)
    tl.store(head + PADDED_TO, tl.maximum(num_tokens, tl.load(head + NUM_TOKENS)))
    tl.store(head + NUM_TOKENS, num_tokens)
    tl.store(head + NUM_ROWS, num_rows)
    tl.store(head + ROWS_AT, offset)
    tl.store(head + UNKNOWNS_AT, unknown)
    tl.store(head + ARE_DECODES, tl.where(num_long == 0, 1, 0))


@triton.jit
def _index_draft_states(buffer, draft_line, firsts, max_rows: tl.constexpr, ROW_TILE: tl.constexpr):
    """Record the position of each place from which states are in slots."""
    offset, num_rows, _ = _part(buffer, draft_line)
    for first in range(0, max_rows, ROW_TILE):
        place = first + tl.arange(0, ROW_TILE)
        position = tl.load(buffer + offset + place, mask=place < num_rows, other=NO_FIRST)
        tl.store(firsts + place, position, mask=place < max_rows)


@triton.jit
def _refused(
    is_place,
    count,
    steps_back,
    row,
    start,
    step_id,
    sample_steps,
    sample_ends,
    sample_refused,
    depth: tl.constexpr,
):
    """As in the reference: count the tokens down to the end of the row's last step."""
    concerns = is_place & (count > 0) & (steps_back > 0)
    last = tl.zeros_like(row).to(tl.int64) - 1
    left_off = start
    for entry in tl.static_range(depth):
        step = tl.load(sample_steps + row * depth + entry, mask=concerns, other=-1)
        end = tl.load(sample_ends + row * depth + entry, mask=concerns, other=0)
        refused = tl.load(sample_refused + row * depth + entry, mask=concerns, other=0)
        is_later = (step < step_id) & (step > last)
        left_off = tl.where(is_later, end - refused, left_off)
        last = tl.where(is_later, step, last)
    return tl.maximum(start - left_off, 0)
