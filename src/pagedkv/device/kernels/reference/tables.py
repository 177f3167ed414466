"""Block tables in plain torch: a packet is pulled, its entries are written to the tables, and slots are computed."""

import torch

from pagedkv.device.table_arrays import (
    ARE_DECODES,
    ARE_SINGLE,
    BASE,
    BLOCK_SIZE,
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
from pagedkv.plan_buffer import LENGTH, NUM_WORDS, OFFSET, STEP_HIGH, STEP_LOW, padded

__all__ = ["gather_rows", "map_slots", "pull_packet", "step_tables"]


def pull_packet(arrays: TableArrays) -> None:
    """Copy the next packet to the device, and index each row's parts of the packet.

    Cost: O(packet + rows).
    """
    buffer = arrays.ring[int(arrays.clock[PULLED]) % len(arrays.ring)]
    num_words = int(buffer[NUM_WORDS])
    arrays.packet[:num_words] = buffer[:num_words]
    arrays.clock[NOW] = arrays.clock[PULLED] + 1
    for group in range(arrays.num_tables):
        _index_runs(arrays, group)
        _index_ranges(arrays, group)
    if arrays.draft_line:
        _note_draft_states(arrays)


def step_tables(arrays: TableArrays, *, writes_only: bool = False) -> None:
    """Apply the pulled packet: entries, batch order, slots.

    Args:
        writes_only: apply the entries only to the tables by row, and leave batch and slots unchanged.

    Cost: O(entries + tokens + rows), and the whole table of each row that is new at its place in the batch.
    """
    for group in range(arrays.num_tables):
        _write_entries(arrays, group, writes_only=writes_only)
        if not writes_only:
            _refresh_batch(arrays, group)
            _write_slots(arrays, group)
    if not writes_only:
        _push_samples(arrays)
    arrays.clock[PULLED] = arrays.clock[NOW]
    arrays.clock[LAST_WORDS] = arrays.packet[NUM_WORDS]
    arrays.clock[[RANGES_AT, NUM_RANGES, UNKNOWN_AT]] = arrays.heads[0, [ROWS_AT, NUM_ROWS, UNKNOWNS_AT]].long()


def gather_rows(arrays: TableArrays, rows: torch.Tensor, num_places: int) -> None:
    """Copy whole rows into batch order; rows of -1, and places after them, become null blocks.

    Args:
        rows: int32 ``[n]``.
        num_places: places to write, at least n.
    """
    index = rows.long()
    is_row = (index >= 0)[:, None]
    for group in range(arrays.num_tables):
        tables, batch_tables = _tables_of(arrays, group)
        column = torch.arange(tables.shape[1], device=tables.device)
        is_there = is_row & (column < arrays.extents[group][index][:, None])
        batch_tables[: len(index)] = torch.where(is_there, tables[index], 0)
        batch_tables[len(index) : num_places] = 0
        arrays.held_rows[group, :num_places] = -1
        arrays.held_extents[group, :num_places] = tables.shape[1]


def map_slots(
    arrays: TableArrays, rows: torch.Tensor, offsets: torch.Tensor, positions: torch.Tensor, refused: torch.Tensor
) -> None:
    """Write the slot of every position, and -1 to all later slots.

    Args:
        rows: int32 ``[n]``, -1 for a place without a row.
        offsets: int32 ``[n + 1]``, positions before each place.
        positions: int64 ``[tokens]``.
        refused: int32 ``[n]``, number of positions by which each place moves down.
    """
    flat = torch.arange(len(positions), device=positions.device)
    place = torch.searchsorted(offsets[1:].long(), flat, right=True).clamp(max=max(0, len(rows) - 1))
    for group in range(arrays.num_tables):
        slots = arrays.slots[group]
        slots.fill_(-1)
        if not len(rows) or not len(positions) or not arrays.geometry[group, HAS_SLOTS]:
            continue
        tables, _ = _tables_of(arrays, group)
        row, block_size = rows.long()[place], int(arrays.geometry[group, BLOCK_SIZE])
        position = positions - refused[place]
        index = position // block_size
        is_there = (row >= 0) & (flat < offsets[-1]) & (position >= 0) & (index < tables.shape[1])
        block = tables[row.clamp(min=0), index.clamp(0, tables.shape[1] - 1)].long()
        slots[: len(positions)] = torch.where(is_there, block * block_size + position % block_size, -1)


def _tables_of(arrays: TableArrays, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    base, width = arrays.geometry[group, [BASE, WIDTH]].tolist()
    span = slice(base, base + width * arrays.max_rows)
    return arrays.tables[span].view(-1, width), arrays.batch_tables[span].view(-1, width)


def _part(arrays: TableArrays, line: int, place: int = 0) -> torch.Tensor:
    """Return an array of a part of the packet: the one at ``place`` among those of its line."""
    offset, length = arrays.packet[line + OFFSET : line + LENGTH + 1].tolist()
    start = offset + place * padded(length)
    return arrays.packet[start : start + length]


def _exclusive(counts: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(counts, 0, dtype=torch.int32) - counts


def _index_runs(arrays: TableArrays, group: int) -> None:
    line = int(arrays.geometry[group, RUNS_LINE])
    rows, starts, counts = _part(arrays, line).long(), _part(arrays, line, 1), _part(arrays, line, 2)
    firsts = _exclusive(counts)
    num_runs = len(rows)
    arrays.run_firsts[group, :num_runs] = firsts
    arrays.run_firsts[group, num_runs:] = counts.sum()
    arrays.run_of_row[group, rows, RUN_START] = starts
    arrays.run_of_row[group, rows, RUN_COUNT] = counts
    arrays.run_of_row[group, rows, RUN_FIRST] = firsts
    arrays.run_stamps[group, rows] = arrays.clock[NOW]
    ends = starts + counts
    # A run at the first entry replaces the whole row if it is from a call; from a plan, it may change only that entry.
    is_anew = (starts == 0) & (_step_id(arrays) == 0)
    before = torch.where(is_anew, 0, arrays.extents[group, rows])
    arrays.extents[group, rows] = torch.maximum(before, ends)
    head, num_entries = arrays.heads[group], int(counts.sum())
    head[NUM_RUNS], head[RUNS_AT] = num_runs, arrays.packet[line + OFFSET]
    head[NUM_ENTRIES], head[ENTRIES_AT] = num_entries, arrays.packet[int(arrays.geometry[group, ENTRIES_LINE]) + OFFSET]
    head[ARE_SINGLE] = bool((counts == 1).all())


def _index_ranges(arrays: TableArrays, group: int) -> None:
    rows = _part(arrays, arrays.compute_line)
    num_rows, starts = len(rows), _part(arrays, arrays.compute_line, 1)
    shift = _refused(arrays, rows, starts)
    line = int(arrays.geometry[group, STARTS_LINE])
    mine = _part(arrays, line) if line else starts
    begin = torch.where(mine == starts, starts - shift, mine)
    end = _part(arrays, arrays.compute_line, 2) - shift
    lengths = torch.clamp(end - begin, min=0)
    for array, values in ((arrays.starts, begin), (arrays.seq_lens, end)):
        array[group, :num_rows] = values
        array[group, num_rows:] = 0
    total = int(lengths.sum())
    arrays.offsets[group, :num_rows] = _exclusive(lengths)
    arrays.offsets[group, num_rows:] = total
    head = arrays.heads[group]
    head[NUM_ROWS], head[ROWS_AT] = num_rows, arrays.packet[arrays.compute_line + OFFSET]
    head[UNKNOWNS_AT] = arrays.packet[arrays.unknown_line + OFFSET]
    head[PADDED_TO] = max(total, int(head[NUM_TOKENS]))
    head[NUM_TOKENS] = total
    head[ARE_DECODES] = bool((lengths == 1).all())
    if group == 0:
        arrays.places[rows.long()] = torch.arange(num_rows, dtype=torch.int32, device=rows.device)
        arrays.place_stamps[rows.long()] = arrays.clock[NOW]


def _note_draft_states(arrays: TableArrays) -> None:
    """Record for each place the first position whose state is in a slot; it does not move with refused tokens."""
    firsts = _part(arrays, arrays.draft_line)
    arrays.firsts[: len(firsts)] = firsts
    arrays.firsts[len(firsts) :] = NO_FIRST


def _step_id(arrays: TableArrays) -> torch.Tensor:
    low, high = arrays.packet[STEP_LOW].long(), arrays.packet[STEP_HIGH].long()
    return (high << 32) + (low & 0xFFFF_FFFF)


def _refused(arrays: TableArrays, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Count the tokens by which the range of each row with unknown tokens moves down.

    The range begins where the row's last step ended, minus its refused tokens. A plan assumes that the most tokens were
    accepted, or fewer if the row was rolled back meanwhile; then the range begins at the plan's position.
    """
    counts, steps_back = _part(arrays, arrays.unknown_line), _part(arrays, arrays.unknown_line, 1)
    if len(counts) == 0:
        return torch.zeros_like(rows)
    index = rows.long()
    steps = arrays.sample_steps[index]
    steps = torch.where(steps < _step_id(arrays), steps, -1)
    last, entry = steps.max(1, keepdim=True)
    left_off = (arrays.sample_ends[index] - arrays.sample_refused[index]).gather(1, entry)[:, 0]
    is_moved = (counts > 0) & (steps_back > 0) & (last[:, 0] >= 0)
    return torch.where(is_moved, torch.clamp(starts - left_off, min=0), 0).to(torch.int32)


def _push_samples(arrays: TableArrays) -> None:
    rows = _part(arrays, arrays.compute_line).long()
    cursor = (arrays.sample_counts[rows] % arrays.sample_steps.shape[1]).long()
    arrays.sample_steps[rows, cursor] = _step_id(arrays)
    arrays.sample_ends[rows, cursor] = arrays.seq_lens[0, : len(rows)]
    arrays.sample_refused[rows, cursor] = 0
    arrays.sample_counts[rows] += 1


def _write_entries(arrays: TableArrays, group: int, *, writes_only: bool) -> None:
    line = arrays.geometry[group]
    block_ids = _part(arrays, int(line[ENTRIES_LINE]))
    rows = _part(arrays, int(line[RUNS_LINE])).long()
    if len(rows) == 0:
        return
    tables, batch_tables = _tables_of(arrays, group)
    starts, counts = _part(arrays, int(line[RUNS_LINE]), 1), _part(arrays, int(line[RUNS_LINE]), 2)
    run = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts.long())
    flat = torch.arange(len(block_ids), device=rows.device)
    index = starts[run] + flat - arrays.run_firsts[group][run]
    tables[rows[run], index] = block_ids
    is_in_batch = (arrays.place_stamps[rows] == arrays.clock[NOW]) & (not writes_only)
    arrays.changed[group, rows[~is_in_batch]] = arrays.clock[NOW]
    inside = is_in_batch[run]
    batch_tables[arrays.places[rows].long()[run[inside]], index[inside]] = block_ids[inside]


def _refresh_batch(arrays: TableArrays, group: int) -> None:
    """Copy the rows that are new at their places, or were changed while they were out of the batch."""
    tables, batch_tables = _tables_of(arrays, group)
    rows = _part(arrays, arrays.compute_line).long()
    held, extents = arrays.held_rows[group], arrays.extents[group]
    is_stale = (held[: len(rows)] != rows) | (arrays.changed[group, rows] > arrays.held_stamps[group, : len(rows)])
    for place in is_stale.nonzero().flatten().tolist():
        row = int(rows[place])
        batch_tables[place, : int(extents[row])] = tables[row, : int(extents[row])]
        batch_tables[place, int(extents[row]) :] = 0
    for place in (held[len(rows) :] >= 0).nonzero().flatten().tolist():
        batch_tables[len(rows) + place] = 0
    held[: len(rows)] = rows.int()
    held[len(rows) :] = -1
    arrays.held_extents[group] = 0
    arrays.held_extents[group, : len(rows)] = extents[rows]
    arrays.held_stamps[group, : len(rows)] = arrays.clock[NOW]


def _write_slots(arrays: TableArrays, group: int) -> None:
    total, padded_to = arrays.heads[group, [NUM_TOKENS, PADDED_TO]].tolist()
    slots = arrays.slots[group]
    slots[total:padded_to] = -1
    if not arrays.geometry[group, HAS_SLOTS]:
        return
    tables, _ = _tables_of(arrays, group)
    rows = _part(arrays, arrays.compute_line).long()
    block_size = int(arrays.geometry[group, BLOCK_SIZE])
    starts, offsets = arrays.starts[group, : len(rows)], arrays.offsets[group]
    lengths = offsets[1 : len(rows) + 1] - offsets[: len(rows)]
    place = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths.long())
    position = (starts - offsets[: len(rows)])[place] + torch.arange(total, device=rows.device)
    block = tables[rows[place], position // block_size].long()
    slots[:total] = block * block_size + position % block_size
