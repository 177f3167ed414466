"""Lists of a step's attention work, made on a GPU: tiles of decoding rows, items of prompts, and merges.

One program for each row sums the numbers of entries of earlier rows, and writes the row's entries after them.
"""

from typing import Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedkv.device.kernels.inputs import (
    ITEM_WORDS as ITEM_WORDS_,
    MERGE_WORDS as MERGE_WORDS_,
    MOST_COMMON as MOST_COMMON_,
    NO_PARTIAL as NO_PARTIAL_,
    SEES_ALL as SEES_ALL_,
    SPANS as SPANS_,
    TILE_WORDS as TILE_WORDS_,
    PagedRows,
    WorkList,
)
from pagedkv.device.kernels.triton.overlapping import launch_options, may_overlap

ITEM_WORDS = tl.constexpr(ITEM_WORDS_)
TILE_WORDS = tl.constexpr(TILE_WORDS_)
MERGE_WORDS = tl.constexpr(MERGE_WORDS_)
MOST_COMMON = tl.constexpr(MOST_COMMON_)
NO_PARTIAL = tl.constexpr(NO_PARTIAL_)
SEES_ALL = tl.constexpr(SEES_ALL_)
SPANS = tl.constexpr(SPANS_)
TILE: Final = 128
WIDTH_TILE: Final = 512
RANK_TILE: Final = 16


def list_work(work: WorkList, rows: PagedRows, block_size: int) -> None:
    """As :func:`pagedkv.device.kernels.reference.list_work`."""
    num_places = rows.starts.shape[0]
    if num_places == 0:
        return
    overlaps = may_overlap(rows.starts.device)
    options = launch_options(overlaps=overlaps)
    cut, reading = work.tiling, work.reading
    if work.shares:
        tables = rows.block_tables
        _common_kernel[(num_places,)](
            tables,
            rows.starts,
            rows.seq_lens,
            work.common,
            tables.stride(0),
            BLOCK_SIZE=block_size,
            TILE=WIDTH_TILE,
            OVERLAPS=overlaps,
            num_warps=4,
            **options,
        )
        _shared_kernel[(num_places,)](
            work.common,
            work.shared,
            num_places,
            PLACES=triton.next_power_of_2(work.max_places),
            LEAST=2 * cut.shared_span,
            UNIT=max(cut.key_tile, cut.query_keys),
            OVERLAPS=overlaps,
            num_warps=4,
            **options,
        )
    _list_kernel[(num_places,)](
        rows.starts,
        rows.seq_lens,
        rows.query_start_loc,
        work.shared,
        work.tiles,
        work.items,
        work.merges,
        work.counts,
        work.shares_begin,
        work.cut,
        num_places,
        work.few_rows,
        work.chunk_base,
        work.num_shares,
        PLACES=triton.next_power_of_2(work.max_places),
        WINDOW=reading.window,
        CHUNK=reading.chunk,
        SINK_TOKENS=reading.num_sink_tokens if reading.window else 0,
        FEW=work.few_queries,
        KEY_TILE=cut.key_tile,
        SPAN_TILES=cut.span_tiles,
        MOST_SPANS=cut.most_spans,
        TILE_TOKENS=work.tokens_of_tile,
        ITEM_TOKENS=work.tokens_of_item,
        ITEM_KEYS=cut.query_keys,
        SHARED_SPAN=cut.shared_span,
        BY_ITEMS=work.by_items,
        CHUNK_QUERIES=work.chunk_queries,
        CHUNK_TILES=work.chunk_tiles,
        MOST_CHUNK_SPANS=cut.most_chunk_spans,
        CHUNK_PARTIALS=work.chunk_partials,
        TILE=TILE,
        RANK_TILE=RANK_TILE,
        OVERLAPS=overlaps,
        num_warps=4,
        **options,
    )


@triton.jit
def _common_kernel(
    tables, starts, seq_lens, common, table_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Count the tokens in the common leading blocks of a row and the previous one, if both decode one token."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    before = tl.maximum(place - 1, 0)
    start, other = tl.load(starts + place), tl.load(starts + before)
    are_decodes = (tl.load(seq_lens + place) - start == 1) & (tl.load(seq_lens + before) - other == 1)
    full = tl.where(are_decodes & (place > 0), tl.minimum(start, other) // BLOCK_SIZE, 0)
    mine, theirs = tables + place.to(tl.int64) * table_stride, tables + before.to(tl.int64) * table_stride
    same = full
    for first in range(0, full, TILE):
        index = first + tl.arange(0, TILE)
        is_block = index < full
        differs = tl.load(mine + index, mask=is_block, other=0) != tl.load(theirs + index, mask=is_block, other=0)
        same = tl.minimum(same, tl.min(tl.where(differs, index, full), 0))
    tl.store(common + place, same * BLOCK_SIZE)


@triton.jit
def _shared_kernel(
    common,
    shared,
    num_places,
    PLACES: tl.constexpr,
    LEAST: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Find the run of rows that share enough blocks with a row, and the tokens shared by all of them."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    at = tl.arange(0, PLACES)
    tokens = tl.load(common + at, mask=at < num_places, other=0)
    begins = tokens < LEAST
    leader = tl.max(tl.where(begins & (at <= place), at, 0), 0)
    end = tl.min(tl.where((begins | (at >= num_places)) & (at > place), at, PLACES), 0)
    in_run = (at > leader) & (at < end)
    fewest = tl.min(tl.where(in_run, tokens, 2147483647), 0)
    fewest = tl.where(end - leader > 1, fewest // UNIT * UNIT, 0)
    tl.store(shared + 2 * place, fewest)
    tl.store(shared + 2 * place + 1, tl.where((place == leader) & (fewest > 0), end - leader, 0))


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = position // CHUNK * CHUNK
    return first


@triton.jit
def _spans_of(num_pieces, unit: tl.constexpr, most):
    """Return the width of a span, a multiple of a unit, such that there are at most ``most`` spans."""
    fewest = (num_pieces + most - 1) // most
    return tl.maximum((fewest + unit - 1) // unit, 1) * unit


@triton.jit
def _key_tiles(
    start,
    stop,
    common,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Return the first tile after the sink tokens, the number of their tiles, and that of all tiles of a row."""
    first = tl.maximum(common, _first_seen(start, WINDOW, CHUNK)) // KEY_TILE
    num_sink_tiles = tl.minimum((SINK_TOKENS + KEY_TILE - 1) // KEY_TILE, first)
    return first, num_sink_tiles, (stop + KEY_TILE - 1) // KEY_TILE - first + num_sink_tiles


@triton.jit
def _needs(
    start,
    stop,
    common,
    num_sharing,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ITEM_TOKENS: tl.constexpr,
    SHARED_SPAN: tl.constexpr,
    BY_ITEMS: tl.constexpr,
    CHUNK_QUERIES: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    MOST_CHUNK_SPANS: tl.constexpr,
    CHUNK_PARTIALS: tl.constexpr,
):
    """Count the tiles of a row, its items as a prompt and in spans, and its merges as a row of few queries and a chunk.

    Also return the width of its spans, in tiles.
    """
    count = stop - start
    is_few = (count > 0) & (count <= FEW)
    is_chunk = (count > FEW) & (count <= CHUNK_QUERIES)
    _, _, key_tiles = _key_tiles(start, stop, common, WINDOW, CHUNK, SINK_TOKENS, KEY_TILE)
    width = _spans_of(key_tiles, SPAN_TILES, MOST_SPANS)
    if CHUNK_QUERIES > 0:
        most = tl.minimum(MOST_CHUNK_SPANS, CHUNK_PARTIALS // tl.where(is_chunk, count, 1))
        width = tl.where(is_chunk, _spans_of(key_tiles, CHUNK_TILES, most), width)
    shared_width = _spans_of(common, SHARED_SPAN, MOST_COMMON)
    shared_spans = (common + shared_width - 1) // shared_width
    own_spans = (key_tiles + width - 1) // width
    num_spans = own_spans + shared_spans
    num_tiles = tl.where(is_few, (count + TILE_TOKENS - 1) // TILE_TOKENS * key_tiles, 0)
    item_rows = (count + ITEM_TOKENS - 1) // ITEM_TOKENS
    of_prompt = tl.where((count > FEW) & (count > CHUNK_QUERIES), item_rows, 0)
    num_items = (num_sharing + ITEM_TOKENS - 1) // ITEM_TOKENS * shared_spans
    if BY_ITEMS:
        num_tiles = num_tiles * 0
        num_items += tl.where(is_few, item_rows * own_spans, 0)
    num_items += tl.where(is_chunk, item_rows * own_spans, 0)
    of_few = tl.where(is_few & (num_spans > 1), count, 0)
    of_chunk = tl.where(is_chunk & (num_spans > 1), count, 0)
    return num_tiles, of_prompt, num_items, of_few, of_chunk, width


@triton.jit
def _num_longer(start, stop, num_items, end, ITEM_TOKENS: tl.constexpr):
    """Count the items of prompts that end after a position."""
    before = tl.minimum(tl.maximum(end - start, 0) // ITEM_TOKENS, num_items)
    return tl.where(stop > end, num_items - before, 0)


@triton.jit
def _list_kernel(
    starts,
    seq_lens,
    offsets,
    shared,
    tiles,
    items,
    merges,
    counts,
    shares_begin,
    cut,
    num_places,
    few_rows,
    chunk_base,
    num_shares,
    PLACES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ITEM_TOKENS: tl.constexpr,
    ITEM_KEYS: tl.constexpr,
    SHARED_SPAN: tl.constexpr,
    BY_ITEMS: tl.constexpr,
    CHUNK_QUERIES: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    MOST_CHUNK_SPANS: tl.constexpr,
    CHUNK_PARTIALS: tl.constexpr,
    TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    at = tl.arange(0, PLACES)
    is_place = at < num_places
    all_starts = tl.load(starts + at, mask=is_place, other=0)
    all_stops = tl.load(seq_lens + at, mask=is_place, other=0)
    all_tiles, all_prompts, all_items, all_few, all_chunk, _ = _needs(
        all_starts,
        all_stops,
        tl.load(shared + 2 * at, mask=is_place, other=0),
        tl.load(shared + 2 * at + 1, mask=is_place, other=0),
        WINDOW,
        CHUNK,
        SINK_TOKENS,
        FEW,
        KEY_TILE,
        SPAN_TILES,
        MOST_SPANS,
        TILE_TOKENS,
        ITEM_TOKENS,
        SHARED_SPAN,
        BY_ITEMS,
        CHUNK_QUERIES,
        CHUNK_TILES,
        MOST_CHUNK_SPANS,
        CHUNK_PARTIALS,
    )
    is_before = is_place & (at < place)
    tile_base = tl.sum(tl.where(is_before, all_tiles, 0), 0)
    item_base = tl.sum(all_prompts, 0) + tl.sum(tl.where(is_before, all_items, 0), 0)
    few_base = tl.sum(tl.where(is_before, all_few, 0), 0)
    of_chunks = tl.sum(tl.where(is_before, all_chunk, 0), 0)
    start, stop, token = tl.load(starts + place), tl.load(seq_lens + place), tl.load(offsets + place)
    common, num_sharing = tl.load(shared + 2 * place), tl.load(shared + 2 * place + 1)
    num_tiles, num_prompts, num_items, num_few, num_chunk, width = _needs(
        start,
        stop,
        common,
        num_sharing,
        WINDOW,
        CHUNK,
        SINK_TOKENS,
        FEW,
        KEY_TILE,
        SPAN_TILES,
        MOST_SPANS,
        TILE_TOKENS,
        ITEM_TOKENS,
        SHARED_SPAN,
        BY_ITEMS,
        CHUNK_QUERIES,
        CHUNK_TILES,
        MOST_CHUNK_SPANS,
        CHUNK_PARTIALS,
    )
    is_cut = num_few + num_chunk > 0
    num_merges, merge_base = num_chunk, of_chunks
    if BY_ITEMS:
        num_merges, merge_base = num_few + num_chunk, few_base + of_chunks
    if place == num_places - 1:
        tl.store(counts, tile_base + num_tiles)
        tl.store(counts + 1, item_base + num_items)
        tl.store(counts + 2, merge_base + num_merges)

    first, num_sink_tiles, key_tiles = _key_tiles(start, stop, common, WINDOW, CHUNK, SINK_TOKENS, KEY_TILE)
    shared_width = _spans_of(common, SHARED_SPAN, MOST_COMMON)
    shared_spans = (common + shared_width - 1) // shared_width
    count = stop - start
    # The partial rows of a row: where its first span is, and how far the next one is from it.
    num_spans = (key_tiles + width - 1) // width + shared_spans
    is_chunk = num_chunk > 0
    partial_base = tl.where(is_chunk, chunk_base + place * CHUNK_PARTIALS, few_base)
    for begin in range(0, num_tiles, TILE):
        index = begin + tl.arange(0, TILE)
        queries_before = index // key_tiles * TILE_TOKENS
        tile = index % key_tiles
        number = tl.where(tile < num_sink_tiles, tile, first + tile - num_sink_tiles)
        back = tile % width
        is_last = (back == width - 1) | (tile == key_tiles - 1)
        slot = shared_spans + tile // width
        row_of_span = tl.where(is_cut, slot * few_rows + partial_base + queries_before, NO_PARTIAL)
        state = is_last.to(tl.int32) + 2 * (back == 0).to(tl.int32) + 4 * (1 + row_of_span)
        entry = tiles + (tile_base + index).to(tl.int64) * TILE_WORDS
        is_mine = index < num_tiles
        tl.store(entry, place + index * 0, mask=is_mine)
        tl.store(entry + 1, token + queries_before, mask=is_mine)
        tl.store(entry + 2, tl.minimum(count - queries_before, TILE_TOKENS), mask=is_mine)
        tl.store(entry + 3, start + queries_before, mask=is_mine)
        tl.store(entry + 4, number * KEY_TILE, mask=is_mine)
        tl.store(entry + 5, state, mask=is_mine)
        tl.store(entry + 6, slot + SPANS * num_spans + SPANS * SPANS * shared_spans, mask=is_mine)
        tl.store(entry + 7, tile, mask=is_mine)
        tl.store(entry + 8, key_tiles + tile * 0, mask=is_mine)
        tl.store(entry + 9, few_base + tl.where(is_cut, queries_before, 0), mask=is_mine)
    for begin in range(0, num_few, TILE):
        index = begin + tl.arange(0, TILE)
        tl.store(cut + 2 * (few_base + index), token + index, mask=index < num_few)
        tl.store(cut + 2 * (few_base + index) + 1, num_spans + index * 0, mask=index < num_few)
    # Of all tiles each share takes as many, and begins where a span does.
    num_all = tl.sum(all_tiles, 0).to(tl.int64)
    num_after = tl.where(place == num_places - 1, 1, 0)  # where the last share ends
    for begin in range(0, num_shares + 1, TILE):
        share = begin + tl.arange(0, TILE)
        tile = (num_all * share // num_shares).to(tl.int32)
        within = tile - tile_base
        back = tl.where(within < num_tiles, within % tl.maximum(key_tiles, 1) % width, 0)
        is_mine = (within >= 0) & (within < num_tiles + num_after) & (share <= num_shares)
        tl.store(shares_begin + share, tile - back, mask=is_mine)
    for begin in range(0, num_merges, TILE):
        index = begin + tl.arange(0, TILE)
        entry = merges + (merge_base + index) * MERGE_WORDS
        tl.store(entry, token + index, mask=index < num_merges)
        tl.store(entry + 1, num_spans + index * 0, mask=index < num_merges)
        tl.store(entry + 2, partial_base + index, mask=index < num_merges)
        tl.store(entry + 3, tl.where(is_chunk, count, few_rows) + index * 0, mask=index < num_merges)
    # Items of prompts are sorted by their ends across rows, the last end first.
    for begin in range(0, num_prompts, RANK_TILE):
        index = begin + tl.arange(0, RANK_TILE)
        queries_before = index * ITEM_TOKENS
        taken = tl.minimum(count - queries_before, ITEM_TOKENS)
        position = start + queries_before
        end = (position + taken)[:, None]
        is_first = (at <= place)[None, :]
        ends_later = _num_longer(
            all_starts[None, :], all_stops[None, :], all_prompts[None, :], tl.where(is_first, end - 1, end), ITEM_TOKENS
        )
        others = tl.sum(tl.where((at == place)[None, :], 0, ends_later), 1)
        entry = items + (others + num_prompts - 1 - index).to(tl.int64) * ITEM_WORDS
        _write_item(
            entry,
            index < num_prompts,
            place,
            token + queries_before,
            taken,
            position,
            _first_seen(position, WINDOW, CHUNK) // ITEM_KEYS * ITEM_KEYS,
            position + taken,
            tl.full([RANK_TILE], NO_PARTIAL, tl.int32),
            index * 0,
        )
    # Items of decoding rows and chunks follow: one for each span, of a row's own keys or of its shared keys.
    is_own = num_sharing == 0
    num_queries = tl.where(is_own, count, num_sharing)
    num_parts = tl.where(is_own, (key_tiles + width - 1) // width, shared_spans)
    for begin in range(0, num_items, TILE):
        index = begin + tl.arange(0, TILE)
        queries_before = index // num_parts * ITEM_TOKENS
        part = index % num_parts
        taken = tl.minimum(num_queries - queries_before, ITEM_TOKENS)
        position = tl.where(is_own, start + queries_before, SEES_ALL)
        own_key = (first + part * width) * KEY_TILE
        own_end = tl.minimum(own_key + width * KEY_TILE, position + taken)
        _write_item(
            items + (item_base + index).to(tl.int64) * ITEM_WORDS,
            index < num_items,
            place,
            token + queries_before,
            taken,
            position,
            tl.where(is_own, own_key, part * shared_width),
            tl.where(is_own, own_end, tl.minimum(part * shared_width + shared_width, common)),
            tl.where(is_cut, partial_base + queries_before + part * num_chunk, NO_PARTIAL),
            tl.where(is_chunk, 0, part + tl.where(is_own, shared_spans, 0)),
        )


@triton.jit
def _write_item(entry, is_mine, place, token, taken, position, first_key, end_key, partial, slot):
    tl.store(entry, place + token * 0, mask=is_mine)
    tl.store(entry + 1, token, mask=is_mine)
    tl.store(entry + 2, taken, mask=is_mine)
    tl.store(entry + 3, position, mask=is_mine)
    tl.store(entry + 4, first_key, mask=is_mine)
    tl.store(entry + 5, end_key, mask=is_mine)
    tl.store(entry + 6, partial, mask=is_mine)
    tl.store(entry + 7, slot, mask=is_mine)
