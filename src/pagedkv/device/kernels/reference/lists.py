"""Lists of a step's attention work in plain Python, defined by :mod:`pagedkv.device.paged_attention`."""

from collections.abc import Sequence

import torch

from pagedkv.device.paged_attention import MOST_COMMON, NO_PARTIAL, SEES_ALL, SPANS, PagedRows, WorkList

__all__ = ["list_work"]


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
