"""Attention of decoding rows: tiles of keys, distributed over programs that read them in one continuous stream.

A program computes a part of the list for one key head. Its loop runs over tiles, not over rows: the first keys of the
next row are loaded while the last keys of this row are multiplied, so no row begins with a wait. Parts end at ends of
spans, so the answer of a span does not depend on its program.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedkv.device.kernels.triton.launching import Launch
from pagedkv.device.kernels.triton.overlapping import launch_options
from pagedkv.device.kernels.triton.scores import capped, divisor, is_seen, may_be_seen, share_beside_sink, weigh
from pagedkv.device.paged_attention import (
    ENTRY_WORDS as ENTRY_WORDS_,
    NO_PARTIAL as NO_PARTIAL_,
    PagedLayer,
    PagedRows,
    WorkList,
)

__all__ = ["attend_tiles"]

ENTRY_WORDS = tl.constexpr(ENTRY_WORDS_)
NO_PARTIAL = tl.constexpr(NO_PARTIAL_)
SHRUNK = tl.constexpr(16.0)


def attend_tiles(
    work: WorkList,
    layer: PagedLayer,
    rows: PagedRows,
    query: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    launch: Launch,
) -> None:
    """Compute attention of a list's tiles."""
    cut, heads_of_key, num_key_heads = work.tiling, work.reading.heads_of_key, layer.keys.shape[2]
    head_tile = min(heads_of_key, cut.head_tile)
    head_parts = triton.cdiv(heads_of_key, head_tile)
    columns = num_key_heads * head_parts
    tile_tokens = work.tokens_of_tile
    shares = max(1, launch.num_processors * cut.programs // columns)
    # Values of eight bits are read in pairs: tensor cores need them by columns, and loads of single bytes are slow.
    are_pairs = (
        layer.values.dtype.itemsize == 1 and not launch.constants["IS_LATENT"] and layer.values.shape[3] % 2 == 0
    )
    values = layer.values.view(torch.int16) if are_pairs else layer.values
    _tiles_kernel[(columns * shares,)](
        query,
        layer.keys,
        values,
        out,
        work.partials,
        work.sums,
        rows.block_tables,
        work.tiles,
        work.counts,
        query if sinks is None else sinks,
        *launch.scales,
        *query.stride()[:2],
        *layer.keys.stride()[:3],
        *values.stride()[:3],
        *out.stride()[:2],
        rows.block_tables.stride(0),
        work.few_rows,
        launch.scale,
        layer.soft_cap,
        num_key_heads=num_key_heads,
        HEADS_OF_KEY=heads_of_key,
        HEAD_PARTS=head_parts,
        HEAD_TILE=head_tile,
        TILE_TOKENS=tile_tokens,
        ROWS=max(16, triton.next_power_of_2(head_tile * tile_tokens)),
        KEY_TILE=cut.key_tile,
        ARE_PAIRS=are_pairs,
        **launch.constants,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(overlaps=launch.overlaps),
    )


@triton.jit
def _tiles_kernel(
    query,
    keys,
    values,
    out,
    partials,
    sums,
    tables,
    tiles,
    counts,
    sinks,
    key_scales,
    value_scales,
    query_n,
    query_h,
    key_b,
    key_n,
    key_h,
    value_b,
    value_n,
    value_h,
    out_n,
    out_h,
    table_n,
    partial_rows,
    scale,
    soft_cap,
    num_key_heads: tl.constexpr,
    HEADS_OF_KEY: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ARE_PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_FAR: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    IS_LATENT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    scale_step: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    columns: tl.constexpr = num_key_heads * HEAD_PARTS
    column = tl.program_id(0) % columns
    share = (tl.program_id(0) // columns).to(tl.int64)
    num_shares = tl.num_programs(0) // columns
    key_head = (column // HEAD_PARTS).to(tl.int64)
    num_tiles = tl.load(counts)
    begin = (num_tiles * share // num_shares).to(tl.int32)
    end = (num_tiles * (share + 1) // num_shares).to(tl.int32)
    begin -= tl.load(tiles + begin.to(tl.int64) * ENTRY_WORDS + 7, mask=begin < num_tiles, other=0) >> 1
    end -= tl.load(tiles + end.to(tl.int64) * ENTRY_WORDS + 7, mask=end < num_tiles, other=0) >> 1

    row = tl.arange(0, ROWS)
    query_index = row // HEAD_TILE
    head_of_key = column % HEAD_PARTS * HEAD_TILE + row % HEAD_TILE
    head = key_head * HEADS_OF_KEY + head_of_key
    is_head = (head_of_key < HEADS_OF_KEY) & (query_index < TILE_TOKENS)
    dim = tl.arange(0, DIM)
    value_dim = tl.arange(0, VALUE_TILE)
    keys += key_head * key_h
    values += key_head * value_h
    if IS_SCALED:
        scale *= tl.load(key_scales + key_head * scale_step)
        value_scale = tl.load(value_scales + key_head * scale_step)
    if ARE_PAIRS:
        scale *= SHRUNK

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if ARE_PAIRS:
        answer = tl.zeros([ROWS, VALUE_TILE // 2], tl.float32)
        odd_answer = tl.zeros([ROWS, VALUE_TILE // 2], tl.float32)
    else:
        answer = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    # The addresses for a tile's loads are loaded one tile ahead. So keys are requested without a wait, and as many
    # tiles of them are in flight as there are stages.
    last = tl.maximum(end - 1, 0)
    place, token, num_queries, position, first_key, state = _read(tiles, tl.minimum(begin, last))
    block = _blocks(
        tables, table_n, place, num_queries, position, first_key, WINDOW, CHUNK, SINK_TOKENS, BLOCK_SIZE, KEY_TILE
    )
    for number in range(begin, end):
        next_place, next_token, next_queries, next_position, next_key, next_state = _read(
            tiles, tl.minimum(number + 1, last)
        )
        is_row = is_head & (query_index < num_queries)
        key = first_key + tl.arange(0, KEY_TILE)
        # Keys that no query of the tile sees may belong to any row, or be NaN: they are not read.
        is_key = (key < position + num_queries) & may_be_seen(key, position, WINDOW, CHUNK, SINK_TOKENS)
        offset = key % BLOCK_SIZE
        if IS_FAR:
            offset = offset.to(tl.int64)
        key_at = keys + (block.to(tl.int64) * key_b + offset * key_n)[:, None]
        content = tl.load(key_at + dim[None, :], mask=is_key[:, None] & (dim < KEY_DIM)[None, :], other=0.0)
        query_at = query + ((token.to(tl.int64) + query_index) * query_n + head * query_h)[:, None]
        asked = tl.load(query_at + dim[None, :], mask=is_row[:, None] & (dim < KEY_DIM)[None, :], other=0.0)
        if ARE_PAIRS:
            # Eight bits are converted to float16 in one instruction, so queries become float16 too, scaled down to fit
            # up to 2**20.
            asked = (asked.to(tl.float32) / SHRUNK).to(tl.float16)
        products = tl.dot(asked, tl.trans(content.to(asked.dtype)), input_precision=PRECISION)
        if REST > 0:
            rest = DIM + tl.arange(0, REST)
            is_rest = (rest < KEY_DIM)[None, :]
            more = tl.load(key_at + rest[None, :], mask=is_key[:, None] & is_rest, other=0.0)
            asked_more = tl.load(query_at + rest[None, :], mask=is_row[:, None] & is_rest, other=0.0)
            if ARE_PAIRS:
                asked_more = (asked_more.to(tl.float32) / SHRUNK).to(tl.float16)
            products = tl.dot(asked_more, tl.trans(more.to(asked.dtype)), products, input_precision=PRECISION)
        scores, times = products, scale
        if HAS_CAP:
            scores, times = capped(products, scale, soft_cap)
        seen = is_seen(key[None, :], (position + query_index)[:, None], WINDOW, CHUNK, SINK_TOKENS)
        scores = tl.where(seen & is_key[None, :], scores, float("-inf"))

        is_first = state < 2
        largest = tl.where(is_first, float("-inf"), largest)
        total = tl.where(is_first, 0.0, total)
        answer = tl.where(is_first, 0.0, answer)
        if ARE_PAIRS:
            odd_answer = tl.where(is_first, 0.0, odd_answer)
        weights, largest, total, before = weigh(scores, times, largest, total)
        answer = answer * before[:, None]
        value_at = values + (block.to(tl.int64) * value_b + offset * value_n)[:, None]
        if ARE_PAIRS:
            pair = tl.arange(0, VALUE_TILE // 2)
            held = tl.load(value_at + pair[None, :], mask=is_key[:, None] & (pair < VALUE_DIM // 2)[None, :], other=0)
            stored: tl.constexpr = keys.dtype.element_ty
            even = (held & 255).to(tl.uint8).to(stored, bitcast=True).to(tl.float16)
            odd = ((held >> 8) & 255).to(tl.uint8).to(stored, bitcast=True).to(tl.float16)
            weights = weights.to(tl.float16)
            odd_answer = odd_answer * before[:, None]
            answer = tl.dot(weights, even, answer)
            odd_answer = tl.dot(weights, odd, odd_answer)
        else:
            if IS_LATENT:
                held = content
            else:
                is_held = is_key[:, None] & (value_dim < VALUE_DIM)[None, :]
                held = tl.load(value_at + value_dim[None, :], mask=is_held, other=0.0)
            answer = tl.dot(weights.to(asked.dtype), held.to(asked.dtype), answer, input_precision=PRECISION)

        if state % 2 == 1:
            entry = tiles + number * ENTRY_WORDS
            slot = tl.load(entry + 5)
            partial = tl.load(entry + 6)
            is_answer = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
            factor = 1.0 / tl.where(total == 0.0, 1.0, total)
            if HAS_SINKS:
                whole = share_beside_sink(largest, total, tl.load(sinks + head, mask=is_row, other=0.0))
                factor = tl.where(partial == NO_PARTIAL, whole, factor)
            scaled = (tl.interleave(answer, odd_answer) if ARE_PAIRS else answer) * factor[:, None]
            if IS_SCALED:
                scaled *= value_scale
            if partial == NO_PARTIAL:
                target = out + ((token.to(tl.int64) + query_index) * out_n + head * out_h)[:, None] + value_dim[None, :]
                tl.store(target, scaled.to(out.dtype.element_ty), mask=is_answer)
            else:
                at = (slot.to(tl.int64) * partial_rows + partial + query_index) * (num_key_heads * HEADS_OF_KEY) + head
                tl.store(partials + at[:, None] * VALUE_DIM + value_dim[None, :], scaled, mask=is_answer)
                tl.store(sums + at, divisor(largest, total), mask=is_row)

        token, num_queries, position = next_token, next_queries, next_position
        first_key, state = next_key, next_state
        block = _blocks(
            tables,
            table_n,
            next_place,
            num_queries,
            position,
            first_key,
            WINDOW,
            CHUNK,
            SINK_TOKENS,
            BLOCK_SIZE,
            KEY_TILE,
        )


@triton.jit
def _read(tiles, number):
    """Load the words of a tile that its loads need, and whether it ends a span."""
    entry = tiles + number.to(tl.int64) * ENTRY_WORDS
    return (
        tl.load(entry),
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
        tl.load(entry + 7),
    )


@triton.jit
def _blocks(
    tables,
    table_n,
    place,
    num_queries,
    position,
    first_key,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Load the block of each key of a tile that a query may see."""
    key = first_key + tl.arange(0, KEY_TILE)
    is_key = (key < position + num_queries) & may_be_seen(key, position, WINDOW, CHUNK, SINK_TOKENS)
    return tl.load(tables + place.to(tl.int64) * table_n + key // BLOCK_SIZE, mask=is_key, other=0)
