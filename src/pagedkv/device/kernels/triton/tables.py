"""Block tables on a GPU: one kernel per step, after those of :mod:`pagedkv.device.kernels.triton.packets`.

It uses their index, so its programs may run in any order. They are of three kinds::

    | entry programs, few per group | place programs, one for each PLACES places of a group | token programs |
      entries into both tables        whole rows that are new at their places                 slots, and -1 after

No program waits for the writes of another: a program that needs an entry of this packet reads it from the packet.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from pagedkv.device.kernels.triton.overlapping import launch_options, may_overlap
from pagedkv.device.kernels.triton.packets import step_of
from pagedkv.device.kernels.triton.searching import last_at_most
from pagedkv.device.kernels.triton.words import (
    ARE_DECODES,
    ARE_SINGLE,
    BASE,
    BLOCK_SIZE,
    ENTRIES_AT,
    HAS_SLOTS,
    LAST_WORDS,
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
    PADDED_TO,
    PULLED,
    RANGES_AT,
    ROWS_AT,
    RUN_COUNT,
    RUN_FIRST,
    RUN_START,
    RUNS_AT,
    UNKNOWN_AT,
    UNKNOWNS_AT,
    WIDTH,
)
from pagedkv.device.table_arrays import TableArrays

# There are many small programs, since larger ones would need too many registers to copy rows to their places. 1,024
# rows of 131k tokens in four groups that all have new places take 109 us; with tiles of 2,048 entries and 8 places per
# program they take 301 us, and decode steps are equally fast.
ENTRY_PROGRAMS = 8
ENTRY_TILE = 256
PLACES = 2
PLACE_TILE = 512
TOKEN_PROGRAMS = 128
TOKEN_TILE = 256


def step_tables(arrays: TableArrays, *, writes_only: bool = False) -> None:
    """As :func:`pagedkv.device.kernels.reference.step_tables`."""
    overlaps = may_overlap(arrays.packet.device)
    max_tokens = arrays.slots.shape[1]
    place_programs = 0 if writes_only else triton.cdiv(arrays.max_rows, PLACES)
    token_programs = 0 if writes_only else min(TOKEN_PROGRAMS, triton.cdiv(max_tokens, TOKEN_TILE))
    _step_kernel[(ENTRY_PROGRAMS + place_programs + token_programs, arrays.num_tables)](
        arrays.packet,
        arrays.clock,
        arrays.geometry,
        arrays.tables,
        arrays.batch_tables,
        arrays.run_of_row,
        arrays.run_stamps,
        arrays.run_firsts,
        arrays.places,
        arrays.place_stamps,
        arrays.extents,
        arrays.changed,
        arrays.held_rows,
        arrays.held_extents,
        arrays.held_stamps,
        arrays.starts,
        arrays.seq_lens,
        arrays.offsets,
        arrays.heads,
        arrays.sample_steps,
        arrays.sample_ends,
        arrays.sample_refused,
        arrays.sample_counts,
        arrays.slots,
        max_rows=arrays.max_rows,
        max_tokens=max_tokens,
        depth=arrays.sample_steps.shape[1],
        ENTRY_PROGRAMS=ENTRY_PROGRAMS,
        PLACE_PROGRAMS=place_programs,
        TOKEN_PROGRAMS=token_programs,
        ENTRY_TILE=ENTRY_TILE,
        PLACES=PLACES,
        PLACE_TILE=PLACE_TILE,
        TOKEN_TILE=TOKEN_TILE,
        WRITES_ONLY=writes_only,
        OVERLAPS=overlaps,
        num_warps=2,
        **launch_options(overlaps=overlaps),
    )


@triton.jit
def _step_kernel(
    packet,
    clock,
    geometry,
    tables,
    batch_tables,
    run_of_row,
    run_stamps,
    run_firsts,
    places,
    place_stamps,
    extents,
    changed,
    held_rows,
    held_extents,
    held_stamps,
    starts,
    seq_lens,
    offsets,
    heads,
    sample_steps,
    sample_ends,
    sample_refused,
    sample_counts,
    slots,
    max_rows: tl.constexpr,
    max_tokens: tl.constexpr,
    depth: tl.constexpr,
    ENTRY_PROGRAMS: tl.constexpr,
    PLACE_PROGRAMS: tl.constexpr,
    TOKEN_PROGRAMS: tl.constexpr,
    ENTRY_TILE: tl.constexpr,
    PLACES: tl.constexpr,
    PLACE_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    WRITES_ONLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    program = tl.program_id(0)
    group = tl.program_id(1)
    # All values of the group are read by independent loads.
    base = tl.load(geometry + group * NUM_COLUMNS + BASE)
    width = tl.load(geometry + group * NUM_COLUMNS + WIDTH).to(tl.int32)
    if OVERLAPS:
        gdc_wait()
    now = tl.load(clock + NOW)
    head = heads + group * NUM_HEADS
    entries = packet + tl.load(head + ENTRIES_AT)
    rows = packet + tl.load(head + ROWS_AT)
    num_rows = tl.load(head + NUM_ROWS)
    run_of_row += group * max_rows * NUM_RUN_COLUMNS
    run_stamps += group * max_rows
    if program < ENTRY_PROGRAMS:
        if (program == 0) & (group == 0):
            tl.store(clock + PULLED, now)
            tl.store(clock + LAST_WORDS, tl.load(packet + NUM_WORDS).to(tl.int64))
            tl.store(clock + RANGES_AT, tl.load(head + ROWS_AT).to(tl.int64))
            tl.store(clock + NUM_RANGES, num_rows.to(tl.int64))
            tl.store(clock + UNKNOWN_AT, tl.load(head + UNKNOWNS_AT).to(tl.int64))
        _write_entries(
            packet + tl.load(head + RUNS_AT),
            entries,
            program,
            now,
            tables + base,
            batch_tables + base,
            width,
            run_of_row,
            run_firsts + group * (max_rows + 1),
            places,
            place_stamps,
            changed + group * max_rows,
            tl.load(head + NUM_RUNS),
            tl.load(head + NUM_ENTRIES),
            tl.load(head + ARE_SINGLE),
            ENTRY_PROGRAMS,
            ENTRY_TILE,
            WRITES_ONLY,
        )
    elif program < ENTRY_PROGRAMS + PLACE_PROGRAMS:
        _refresh_places(
            rows,
            num_rows,
            entries,
            program - ENTRY_PROGRAMS,
            now,
            tables + base,
            batch_tables + base,
            width,
            run_of_row,
            run_stamps,
            extents + group * max_rows,
            changed + group * max_rows,
            held_rows + group * max_rows,
            held_extents + group * max_rows,
            held_stamps + group * max_rows,
            max_rows,
            PLACE_PROGRAMS,
            PLACES,
            PLACE_TILE,
        )
        if group == 0:
            _push_samples(
                rows,
                num_rows,
                program - ENTRY_PROGRAMS,
                step_of(packet),
                seq_lens,
                sample_steps,
                sample_ends,
                sample_refused,
                sample_counts,
                depth,
                PLACE_PROGRAMS,
                PLACES,
            )
    else:
        _write_slots(
            rows,
            num_rows,
            entries,
            program - ENTRY_PROGRAMS - PLACE_PROGRAMS,
            now,
            tables + base,
            width,
            tl.load(geometry + group * NUM_COLUMNS + BLOCK_SIZE).to(tl.int32),
            tl.load(geometry + group * NUM_COLUMNS + HAS_SLOTS).to(tl.int32),
            run_of_row,
            run_stamps,
            starts + group * max_rows,
            offsets + group * (max_rows + 1),
            slots + group * max_tokens,
            tl.load(head + NUM_TOKENS),
            tl.load(head + PADDED_TO),
            tl.load(head + ARE_DECODES),
            TOKEN_PROGRAMS,
            TOKEN_TILE,
        )


@triton.jit
def _write_entries(
    runs,
    entries,
    program,
    now,
    table,
    batch_table,
    width,
    run_of_row,
    run_firsts,
    places,
    place_stamps,
    changed,
    num_runs,
    num_entries,
    are_single,
    ENTRY_PROGRAMS: tl.constexpr,
    ENTRY_TILE: tl.constexpr,
    WRITES_ONLY: tl.constexpr,
):
    """Write the packet's entries into the table by row, and, if the row is in the batch, at its place there."""
    for first in range(program * ENTRY_TILE, num_entries, ENTRY_PROGRAMS * ENTRY_TILE):
        entry = first + tl.arange(0, ENTRY_TILE)
        is_entry = entry < num_entries
        block = tl.load(entries + entry, mask=is_entry, other=0)
        run = last_at_most(run_firsts, num_runs, entry, are_single)
        row = tl.load(runs + run, mask=is_entry, other=0)
        run_first = tl.load(run_firsts + run, mask=is_entry, other=0)
        start = tl.load(run_of_row + row * NUM_RUN_COLUMNS + RUN_START, mask=is_entry, other=0)
        index = start + entry - run_first
        is_entry = is_entry & (index < width)
        tl.store(table + row.to(tl.int64) * width + index, block, mask=is_entry)
        if WRITES_ONLY:
            tl.store(changed + row, now, mask=is_entry)
        else:
            place = tl.load(places + row, mask=is_entry, other=0)
            in_batch = is_entry & (tl.load(place_stamps + row, mask=is_entry, other=0) == now)
            tl.store(batch_table + place.to(tl.int64) * width + index, block, mask=in_batch)
            tl.store(changed + row, now, mask=is_entry & ~in_batch)


@triton.jit
def _refresh_places(
    rows,
    num_rows,
    entries,
    program,
    now,
    table,
    batch_table,
    width,
    run_of_row,
    run_stamps,
    extents,
    changed,
    held_rows,
    held_extents,
    held_stamps,
    max_rows: tl.constexpr,
    PLACE_PROGRAMS: tl.constexpr,
    PLACES: tl.constexpr,
    PLACE_TILE: tl.constexpr,
):
    """Copy whole rows to places where they are new or stale; write null blocks to places without a row.

    A program's places are not adjacent, so that a few new rows at the front are copied by as many programs.
    """
    place = program + tl.arange(0, PLACES) * PLACE_PROGRAMS
    is_place = place < max_rows
    row = tl.load(rows + place, mask=place < num_rows, other=-1)
    held = tl.load(held_rows + place, mask=is_place, other=-1)
    num_held = tl.load(held_extents + place, mask=is_place, other=0)
    held_stamp = tl.load(held_stamps + place, mask=is_place, other=0)
    num_known = tl.load(extents + row, mask=row >= 0, other=0)
    changed_at = tl.load(changed + row, mask=row >= 0, other=0)
    is_stale = is_place & ((held != row) | (changed_at > held_stamp))
    tl.debug_barrier()  # else a warp could overwrite words that another one still has to read
    tl.store(held_stamps + place, now, mask=row >= 0)
    tl.store(held_extents + place, num_known, mask=is_place)
    tl.store(held_rows + place, row, mask=is_place)
    if tl.max(is_stale.to(tl.int32), 0) > 0:
        for number in range(PLACES):
            is_this = tl.arange(0, PLACES) == number
            if tl.sum((is_this & is_stale).to(tl.int32), 0) > 0:
                _copy_row(
                    tl.sum(tl.where(is_this, row, 0), 0),
                    program + number * PLACE_PROGRAMS,
                    tl.sum(tl.where(is_this, num_known, 0), 0),
                    tl.sum(tl.where(is_this, num_held, 0), 0),
                    entries,
                    now,
                    table,
                    batch_table,
                    width,
                    run_of_row,
                    run_stamps,
                    PLACE_TILE,
                )


@triton.jit
def _copy_row(
    row,
    place,
    num_known,
    num_held,
    entries,
    now,
    table,
    batch_table,
    width,
    run_of_row,
    run_stamps,
    PLACE_TILE: tl.constexpr,
):
    """Copy a row with the packet's entries to its place, and fill the rest of the place with null blocks."""
    known_row = tl.maximum(row, 0)
    run_record = run_of_row + known_row * NUM_RUN_COLUMNS
    has_run = (row >= 0) & (tl.load(run_stamps + known_row) == now)
    start = tl.load(run_record + RUN_START)
    stop = start + tl.where(has_run, tl.load(run_record + RUN_COUNT), 0)
    run_first = tl.load(run_record + RUN_FIRST)
    source = table + known_row.to(tl.int64) * width
    target = batch_table + place.to(tl.int64) * width
    end = tl.maximum(num_known, num_held)
    for first in range(0, end, PLACE_TILE):
        index = first + tl.arange(0, PLACE_TILE)
        is_new = (index >= start) & (index < stop)
        block = tl.load(source + index, mask=(index < num_known) & ~is_new, other=0)
        brought = tl.load(entries + run_first + index - start, mask=is_new, other=0)
        tl.store(target + index, tl.where(is_new, brought, block), mask=index < end)


@triton.jit
def _push_samples(
    rows,
    num_rows,
    program,
    step_id,
    ends,
    sample_steps,
    sample_ends,
    sample_refused,
    sample_counts,
    depth: tl.constexpr,
    PLACE_PROGRAMS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Record that this step computes these rows, with no refused tokens so far."""
    place = program + tl.arange(0, PLACES) * PLACE_PROGRAMS
    is_place = place < num_rows
    row = tl.load(rows + place, mask=is_place, other=0)
    count = tl.load(sample_counts + row, mask=is_place, other=0)
    end = tl.load(ends + place, mask=is_place, other=0)
    at = row * depth + count % depth
    tl.store(sample_steps + at, step_id, mask=is_place)
    tl.store(sample_ends + at, end, mask=is_place)
    tl.store(sample_refused + at, 0, mask=is_place)
    tl.debug_barrier()  # else a warp could overwrite words that another one still has to read
    tl.store(sample_counts + row, count + 1, mask=is_place)


@triton.jit
def _write_slots(
    rows,
    num_rows,
    entries,
    program,
    now,
    table,
    width,
    block_size,
    has_slots,
    run_of_row,
    run_stamps,
    starts,
    offsets,
    slots,
    num_tokens,
    padded_to,
    are_decodes,
    TOKEN_PROGRAMS: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
):
    """Write the slot of every token of the step, and -1 over further slots of earlier steps."""
    for first in range(program * TOKEN_TILE, padded_to, TOKEN_PROGRAMS * TOKEN_TILE):
        token = first + tl.arange(0, TOKEN_TILE)
        is_token = token < num_tokens * has_slots
        place = last_at_most(offsets, num_rows, token, are_decodes)
        row = tl.load(rows + place, mask=is_token, other=0)
        before = tl.load(offsets + place, mask=is_token, other=0)
        position = tl.load(starts + place, mask=is_token, other=0) + token - before
        index = position // block_size
        is_known = is_token & (index < width)
        run_record = run_of_row + row * NUM_RUN_COLUMNS
        stamp = tl.load(run_stamps + row, mask=is_token, other=0)
        start = tl.load(run_record + RUN_START, mask=is_token, other=0)
        count = tl.load(run_record + RUN_COUNT, mask=is_token, other=0)
        run_first = tl.load(run_record + RUN_FIRST, mask=is_token, other=0)
        block = tl.load(table + row.to(tl.int64) * width + index, mask=is_known, other=0)
        is_new = is_token & (stamp == now) & (index >= start) & (index < start + count)
        brought = tl.load(entries + run_first + index - start, mask=is_new, other=0)
        slot = tl.where(is_new, brought, block).to(tl.int64) * block_size + position % block_size
        tl.store(slots + token, tl.where(is_token, slot, -1), mask=token < padded_to)
