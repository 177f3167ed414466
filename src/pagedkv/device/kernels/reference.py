"""The kernels in plain torch: used on a CPU, and as the reference in tests of the Triton kernels.

In this order: attention, which gathers the keys that each row sees; whole blocks, copied or zeroed; noise and draws;
filters, which sort every row; lists of a step's attention work, defined by :mod:`pagedkv.device.kernels.inputs`;
recurrent states; block tables, to which a packet's entries are written; a step's tokens, written to their slots.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from pagedkv.device.kernels.inputs import (
    FACTORS,
    GAMMA,
    MOST_COMMON,
    NO_PARTIAL,
    NO_TOKEN,
    SEES_ALL,
    SHIFTS,
    SPANS,
    UNUSED_BITS,
    Draws,
    Filters,
    PagedLayer,
    PagedRows,
    Reading,
    StateSide,
    TokenSide,
    WorkList,
)
from pagedkv.device.shapes import Pieces
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
from pagedkv.plan_buffer import LENGTH, NUM_WORDS, OFFSET, STEP_HIGH, STEP_LOW, padded


def attend_rows(  # noqa: PLR0913, PLR0917 - the work, the layer, the rows, inputs and outputs
    work: WorkList,
    layer: PagedLayer,
    rows: PagedRows,
    query: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    has_prompts: bool = True,
) -> None:
    """Compute attention of a step's queries; the step's own keys must be in their slots already.

    Args:
        work: the list of these rows, made by ``list_work`` in the same step.
        layer: its keys and values.
        rows: rows of the step. Blocks that no query sees are not read, so their table entries may be arbitrary.
        query: ``[tokens, heads, key_dim]``, with contiguous elements of a head.
        out: ``[tokens, heads, value_dim]``, likewise; tokens that belong to no row are unchanged.
        sinks: float ``[heads]``: for each head a score without a value in its softmax.
        has_prompts: False: the caller guarantees that no row has more than ``work.few_queries`` queries, which saves a
            launch.

    Cost: O(seen positions x heads x dimensions).
    """
    del has_prompts
    ranges = zip(rows.starts.tolist(), rows.seq_lens.tolist(), rows.query_start_loc.tolist(), strict=False)
    for place, (start, stop, token) in enumerate(ranges):
        if start < stop:
            tokens = slice(token, token + stop - start)
            out[tokens] = _attend(work.reading, layer, rows.block_tables[place], query[tokens], start, sinks)


def _attend(  # noqa: PLR0913, PLR0917 - as above, for one row
    reading: Reading,
    layer: PagedLayer,
    table: torch.Tensor,
    query: torch.Tensor,
    start: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    stop, block_size = start + len(query), layer.keys.shape[1]
    position = torch.arange(start, stop, device=query.device)[:, None]
    key = torch.arange(stop, device=query.device)
    seen = _sees(reading, position, key[None, :])
    taken = key[seen.any(0)]
    block, offset = table[taken // block_size].long(), taken % block_size
    keys = _read(layer.keys, block, offset, layer.key_scales, query.dtype).repeat_interleave(reading.heads_of_key, 1)
    values = _read(layer.values, block, offset, layer.value_scales, query.dtype)
    values = values.repeat_interleave(reading.heads_of_key, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys).float() * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~seen[:, taken], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(query), 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : len(taken)]
    return torch.einsum("hqk,khd->qhd", weights.to(query.dtype), values)


def _sees(reading: Reading, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    seen = key <= position
    if reading.window:
        seen = seen & ((key > position - reading.window) | (key < reading.num_sink_tokens))
    if reading.chunk:
        seen = seen & (key // reading.chunk == position // reading.chunk)
    return seen


def _read(
    blocks: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if blocks.dtype.itemsize == 1:  # torch cannot index eight-bit floats
        content = blocks.view(torch.uint8)[block, offset].view(blocks.dtype)
    else:
        content = blocks[block, offset]
    if scales is None:
        return content.to(dtype)
    return (content.float() * scales[:, None]).to(dtype)


def copy_blocks(  # noqa: PLR0913, PLR0917 - memory, ids and pieces of source and destination
    source: torch.Tensor,
    source_pieces: Pieces,
    source_ids: torch.Tensor,
    destination: torch.Tensor,
    destination_pieces: Pieces,
    destination_ids: torch.Tensor,
) -> None:
    """Copy block ``source_ids[i]`` to block ``destination_ids[i]``, for all i at once.

    Args:
        source, destination: uint8, memory of a pool; equal if blocks are copied within one pool.
        source_pieces, destination_pieces: the pieces of a block of source and destination, in bytes; equal in total.
        source_ids, destination_ids: int32 ``[n]``; destinations are distinct, and none is a source.

    Cost: O(bytes).
    """
    if len(source_ids) == 0:
        return
    content = torch.cat([piece[source_ids.long()] for piece in _pieces_of(source, source_pieces)], dim=1)
    at = 0
    for piece in _pieces_of(destination, destination_pieces):
        piece[destination_ids.long()] = content[:, at : at + piece.shape[1]]
        at += piece.shape[1]


def zero_blocks(memory: torch.Tensor, pieces: Pieces, block_ids: torch.Tensor) -> None:
    """Fill blocks with zeros.

    Args:
        memory: uint8, memory of a pool.
        pieces: the pieces of a block.
        block_ids: int32 ``[n]``.
    """
    for piece in _pieces_of(memory, pieces):
        piece[block_ids.long()] = 0


def _pieces_of(memory: torch.Tensor, pieces: Pieces) -> Iterator[torch.Tensor]:
    """View one piece of every block: uint8 ``[num_blocks, size]``."""
    num_blocks = memory.numel() // sum(pieces.sizes)
    for offset, size, stride in zip(pieces.offsets, pieces.sizes, pieces.strides, strict=True):
        yield memory.as_strided((num_blocks, size), (stride, 1), offset)


WORD_RANGE: Final = 2**64
"""Number of different words. torch's words are signed, so constants are converted to the signed number of equal
bits."""


def noise_words(draws: Draws, first: int, out: torch.Tensor) -> None:
    """Hash consecutive token ids from ``first`` on: int64 ``[rows, tokens]``.

    Cost: O(rows x tokens).
    """
    token_ids = torch.arange(first, first + out.shape[1], device=out.device)
    out.copy_(_words(_keys(draws)[:, None], token_ids))


def draw_tokens(draws: Draws, scores: torch.Tensor, out: torch.Tensor, greatest: torch.Tensor) -> None:
    """Draw one token for each row, and find its greatest score.

    Args:
        draws: parameters of the draws.
        scores: float32, float16 or bfloat16 ``[rows, tokens]``, with contiguous tokens.
        out: int64 ``[rows]``; among equal sums the least id; NO_TOKEN if the row has no token.
        greatest: float32 ``[rows]``; NaN if the row has one.

    Cost: O(rows x tokens); every token is hashed.
    """
    values = scores.float()
    words = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    noise_words(draws, 0, words)
    uniform = ((words >> UNUSED_BITS).double() + (2.0**51 + 0.5)) * 2.0**-52
    is_greedy = draws.temperatures == 0
    divisors = torch.where(is_greedy, 1.0, draws.temperatures).double()
    noise = torch.where(is_greedy[:, None], 0.0, -torch.log(-torch.log(uniform)))
    sums = noise + values.double() / divisors[:, None]
    sums.masked_fill_(values < draws.least[:, None], -torch.inf)
    torch.amax(values, dim=1, out=greatest)
    token_ids = (sums == sums.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    out.copy_(torch.where(torch.isfinite(greatest) & (greatest >= draws.least), token_ids, NO_TOKEN))


def _keys(draws: Draws) -> torch.Tensor:
    keys = _words(draws.seeds, torch.zeros_like(draws.seeds))
    return _words(_words(keys, draws.samples), draws.positions)


def _words(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    word = keys + (counters + 1) * _signed(GAMMA)
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        word ^= (word >> shift) & ((1 << (64 - shift)) - 1)  # torch's shift copies the sign bit
        word *= _signed(factor)
    return word


def _signed(constant: int) -> int:
    return constant - WORD_RANGE if constant >= WORD_RANGE // 2 else constant


def find_least(filters: Filters, scores: torch.Tensor, out: torch.Tensor) -> None:
    """Find the least score that each row's filters keep; equal scores are kept or dropped together.

    Args:
        filters: filters of the rows.
        scores: float32, float16 or bfloat16 ``[rows, tokens]``, with contiguous tokens.
        out: float32 ``[rows]``; -inf if all are kept. Undefined for a row with a NaN.

    Cost: O(rows x tokens x log tokens).
    """
    if scores.numel() == 0:
        return
    values = scores.float().sort(dim=1, descending=True).values
    num_tokens = values.shape[1]
    is_greedy = filters.temperatures == 0
    temperatures = torch.where(is_greedy, 1.0, filters.temperatures)
    has_top_k = (filters.top_k > 0) & (filters.top_k < num_tokens)
    last = torch.where(has_top_k, filters.top_k, num_tokens) - 1
    of_top_k = values.gather(1, last[:, None])
    scaled = values.double() / temperatures.double()[:, None]
    mass = scaled.masked_fill(values < of_top_k, -torch.inf).logsumexp(dim=1, keepdim=True)
    summed = (scaled - mass).exp().cumsum(dim=1)
    num_before = torch.searchsorted(summed, filters.top_p[:, None]).clamp(max=num_tokens - 1)
    of_top_p = values.gather(1, num_before)[:, 0]
    of_min_p = values[:, 0] + temperatures * filters.min_p.clamp(min=1e-38).log()
    least = torch.where(has_top_k, of_top_k[:, 0], -torch.inf)
    least = torch.where(filters.top_p < 1, torch.maximum(least, of_top_p), least)
    least = torch.where(filters.min_p > 0, torch.maximum(least, of_min_p), least)
    out.copy_(torch.where(is_greedy, -torch.inf, least))


def list_work(work: WorkList, rows: PagedRows, block_size: int) -> None:
    """List the attention work of a step, for all layers with equal reads.

    Args:
        work: its tiles, items, merges, counts and shared tokens are written; entries beyond the counts are undefined.
        rows: rows of the step.
        block_size: tokens of a block.

    Cost: O(places^2 + tiles + items); with sharing, O(entries of the tables) more.
    """
    ranges = list(zip(rows.starts.tolist(), rows.seq_lens.tolist(), rows.query_start_loc.tolist(), strict=False))
    if work.shares:
        _find_shared(work, rows, [start if stop - start == 1 else 0 for start, stop, _ in ranges], block_size)
    tiles: list[list[int]] = []
    prompts: list[list[int]] = []
    items: list[list[int]] = []
    merges: list[list[int]] = []
    cut: list[list[int]] = []
    for place, (start, stop, token) in enumerate(ranges):
        common, num_sharing = work.shared[place].tolist()
        row = (place, start, stop, token)
        shared_width = _width(common, work.tiling.shared_span, MOST_COMMON)
        num_shared = -(-common // shared_width)
        items += _shared_items(work, place, token, (common, shared_width, num_sharing), len(cut))
        if 0 < stop - start <= work.few_queries:
            mine, num_spans = _tiles(work, row, common, num_shared, len(cut))
            merged = _merges(token, stop - start, num_spans, len(cut), work.few_rows)
            cut += [each[:2] for each in merged]
            if work.by_items:
                items += _items_of_spans(work, mine)
                merges += merged
            else:
                tiles += mine
        elif start < stop <= start + work.chunk_queries:
            first_row = work.chunk_base + place * work.chunk_partials
            mine, num_spans = _items_of_chunk(work, row, first_row)
            items += mine
            merges += _merges(token, stop - start, num_spans, first_row, stop - start)
        elif start < stop:
            prompts += _items(work, row)
    prompts.sort(key=lambda item: (-item[5], item[0]))  # the longest first, to balance the work
    items = prompts + items
    for array, entries in ((work.tiles, tiles), (work.items, items), (work.merges, merges), (work.cut, cut)):
        _fill(array, entries)
    work.counts.copy_(torch.tensor([len(tiles), len(items), len(merges)]))
    work.shares_begin.copy_(torch.tensor([*_begins(work.num_shares, tiles), len(tiles)]))


def _merges(token: int, count: int, num_spans: int, first_row: int, apart: int) -> list[list[int]]:
    return [[token + index, num_spans, first_row + index, apart] for index in range(count)] if num_spans > 1 else []


def _begins(num_shares: int, tiles: list[list[int]]) -> list[int]:
    """Divide tiles into equal shares that begin where spans do."""
    begins = [len(tiles) * share // num_shares for share in range(num_shares)]
    for share in range(num_shares if tiles else 0):
        while not tiles[begins[share]][5] & 2:
            begins[share] -= 1
    return begins


def _fill(array: torch.Tensor, entries: Sequence[Sequence[int]]) -> None:
    if entries:
        array[: len(entries)] = torch.tensor(entries, dtype=torch.int32, device=array.device)


def _width(num_pieces: int, unit: int, most: int) -> int:
    fewest = -(-num_pieces // most)
    return max(-(-fewest // unit), 1) * unit


def _tiles(
    work: WorkList, row: tuple[int, int, int, int], common: int, num_shared: int, merge: int
) -> tuple[list[list[int]], int]:
    place, start, stop, token = row
    cut, count = work.tiling, stop - start
    first = max(common, work.reading.first_seen(start)) // cut.key_tile
    num_sink_tokens = work.reading.num_sink_tokens if work.reading.window else 0
    numbers = [
        *range(min(-(-num_sink_tokens // cut.key_tile), first)),
        *range(first, -(-stop // cut.key_tile)),
    ]
    width = _width(len(numbers), cut.span_tiles, cut.most_spans)
    num_spans = -(-len(numbers) // width) + num_shared
    tiles = []
    for before in range(0, count, work.tokens_of_tile):
        for index, number in enumerate(numbers):
            back = index % width
            is_last = back == width - 1 or index == len(numbers) - 1
            slot = num_shared + index // width
            span_row = slot * work.few_rows + merge + before if num_spans > 1 else NO_PARTIAL
            tiles.append(
                [
                    place,
                    token + before,
                    min(work.tokens_of_tile, count - before),
                    start + before,
                    number * cut.key_tile,
                    is_last + 2 * (back == 0) + 4 * (1 + span_row),
                    slot + SPANS * num_spans + SPANS * SPANS * num_shared,
                    index,
                    len(numbers),
                    merge + (before if num_spans > 1 else 0),
                ]
            )
    return tiles, num_spans


def _items(work: WorkList, row: tuple[int, int, int, int]) -> list[list[int]]:
    place, start, stop, token = row
    size, unit = work.tokens_of_item, work.tiling.query_keys
    items = []
    for before in range(0, stop - start, size):
        taken, position = min(size, stop - start - before), start + before
        first = work.reading.first_seen(position) // unit * unit
        items.append([place, token + before, taken, position, first, position + taken, NO_PARTIAL, 0])
    return items


def _items_of_chunk(work: WorkList, row: tuple[int, int, int, int], first_row: int) -> tuple[list[list[int]], int]:
    place, start, stop, token = row
    size, key_tile = work.tokens_of_item, work.tiling.key_tile
    num_tiles = -(-stop // key_tile)
    most = min(work.tiling.most_chunk_spans, work.chunk_partials // (stop - start))
    width = _width(num_tiles, work.chunk_tiles, most)
    num_spans = -(-num_tiles // width)
    items = []
    for before in range(0, stop - start, size):
        taken, position = min(size, stop - start - before), start + before
        for span in range(num_spans):
            key = span * width * key_tile
            end = min(key + width * key_tile, position + taken)
            partial = first_row + before + span * (stop - start) if num_spans > 1 else NO_PARTIAL
            items.append([place, token + before, taken, position, key, end, partial, 0])
    return items, num_spans


def _items_of_spans(work: WorkList, tiles: list[list[int]]) -> list[list[int]]:
    """Make one item from the tiles of each span; the item has all queries of the row."""
    key_tile, items = work.tiling.key_tile, []
    for place, token, num_queries, position, key, state, spans, _, _, few_row in tiles:
        if state & 2:
            first_key = key
        if state & 1:
            end, slot = min(key + key_tile, position + num_queries), spans % SPANS
            partial = few_row if state // 4 else NO_PARTIAL
            items.append([place, token, num_queries, position, first_key, end, partial, slot])
    return items


def _shared_items(work: WorkList, place: int, token: int, shared: tuple[int, int, int], merge: int) -> list[list[int]]:
    common, width, num_sharing = shared
    size = work.tokens_of_item
    return [
        [
            place,
            token + before,
            min(size, num_sharing - before),
            SEES_ALL,
            begin,
            min(begin + width, common),
            merge + before,
            begin // width,
        ]
        for before in range(0, num_sharing, size)
        for begin in range(0, common, width)
    ]


def _find_shared(work: WorkList, rows: PagedRows, full: list[int], block_size: int) -> None:
    """Find runs of consecutive rows that begin with the same blocks, and the length that all rows of a run share."""
    cut, tables = work.tiling, rows.block_tables.tolist()
    unit, least = max(cut.key_tile, cut.query_keys), 2 * cut.shared_span
    common = [0]
    for place in range(1, len(full)):
        most = min(full[place - 1], full[place]) // block_size
        same = [mine == theirs for mine, theirs in zip(tables[place][:most], tables[place - 1][:most], strict=True)]
        common.append(block_size * (same.index(False) if False in same else most))
    work.shared.zero_()
    leader = 0
    while leader < len(full):
        end = leader + 1
        while end < len(full) and common[end] >= least:
            end += 1
        if end > leader + 1:
            work.shared[leader:end, 0] = min(common[leader + 1 : end]) // unit * unit
            work.shared[leader, 1] = end - leader
        leader = end


def read_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """Read the state of each row's block; zeros for the null block, with which a sequence begins.

    Args:
        sides: tensors of the states.
        block_ids: int32 ``[n]``.

    Cost: O(elements).
    """
    index = block_ids.long()
    for blocks, rows in sides:
        is_there = (index > 0).view(-1, *[1] * (blocks.ndim - 1))
        rows.copy_(torch.where(is_there, blocks[index], 0).transpose(0, 1))


def write_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """Write each row's state to its block; states for the null block are dropped.

    Args:
        sides: tensors of the states.
        block_ids: int32 ``[n]``, distinct except for null blocks.

    Cost: O(elements).
    """
    kept = block_ids > 0
    index = block_ids[kept].long()
    for blocks, rows in sides:
        blocks[index] = rows[:, kept].transpose(0, 1)


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
    ends_line = int(arrays.geometry[group, ENDS_LINE])
    if ends_line:  # an encoder's tokens are all known
        begin, end = mine, _part(arrays, ends_line)
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


FP8_LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite number of each type; larger numbers are stored as this one, since e4m3 has no infinity."""


def write_tokens(sides: Sequence[TokenSide], slots: torch.Tensor) -> None:
    """Write each token's heads to its slot.

    Args:
        sides: keys and values, or latents alone.
        slots: int64 ``[n or more]``, distinct except for -1, which is skipped; entries from n on are not read.

    Cost: O(tokens x heads x dim).
    """
    for side in sides:
        _write_side(side, slots[: len(side.tokens)])


def _write_side(side: TokenSide, slots: torch.Tensor) -> None:
    blocks, block_size = side.blocks, side.blocks.shape[1]
    is_there = (slots >= 0) & (slots < blocks.shape[0] * block_size)
    kept, slots = side.tokens[is_there], slots[is_there]
    if side.scales is not None:
        largest = FP8_LARGEST[blocks.dtype]
        kept = (kept.float() / side.scales[:, None]).clamp(-largest, largest)
    stored = kept.to(blocks.dtype)
    if blocks.dtype.itemsize == 1:  # torch cannot index eight-bit floats
        stored, blocks = stored.view(torch.uint8), blocks.view(torch.uint8)
    blocks[slots // block_size, slots % block_size] = stored
