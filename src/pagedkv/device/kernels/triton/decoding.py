"""Attention of decoding rows: tiles of keys, distributed over programs that read them in one continuous stream.

A program computes a part of the list for one key head. Its loop runs over tiles, not over rows: the first keys of the
next row are loaded while the last keys of this row are multiplied, so no row begins with a wait. Parts end at ends of
spans, so the answer of a span does not depend on its program. After its part a program merges the rows whose spans are
complete. A row of which several programs have spans is merged by the last of them::

    spans of rows     | A0 A1 A2 A3 | B0 B1 B2 | C0 C1 C2 C3 |
    programs          | 0     | 1                 | 2        |
    merged by         A: 0 or 1, B: 1, C: 1 or 2, whichever ends last

Which one it is does not show: spans are merged in their order. Waiting for nobody, programs may run in any order.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedkv.device.kernels.inputs import (
    NO_PARTIAL as NO_PARTIAL_,
    SPANS as SPANS_,
    TILE_WORDS as TILE_WORDS_,
    PagedLayer,
    PagedRows,
    WorkList,
)
from pagedkv.device.kernels.triton.launching import Launch
from pagedkv.device.kernels.triton.overlapping import launch_options
from pagedkv.device.kernels.triton.scores import capped, divisor, is_seen, may_be_seen, share_beside_sink, weigh

TILE_WORDS = tl.constexpr(TILE_WORDS_)
NO_PARTIAL = tl.constexpr(NO_PARTIAL_)
SPANS = tl.constexpr(SPANS_)
SHRUNK = tl.constexpr(16.0)
LOG2_E = tl.constexpr(1.4426950408889634)
MERGED_OF_WARP: Final = 512
"""Elements of answers that a warp merges at once; with twice as many the partial answers do not fit into registers."""


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
    head_tile, tile_tokens = work.head_tile, work.tokens_of_tile
    head_parts = triton.cdiv(heads_of_key, head_tile)
    # Values of eight bits are read in pairs: tensor cores need them by columns, and loads of single bytes are slow.
    are_pairs = (
        layer.values.dtype.itemsize == 1 and not launch.constants["IS_LATENT"] and layer.values.shape[3] % 2 == 0
    )
    values = layer.values.view(torch.int16) if are_pairs else layer.values
    _tiles_kernel[(num_key_heads * head_parts * work.num_shares,)](
        query,
        layer.keys,
        values,
        out,
        work.partials,
        work.sums,
        work.finished,
        rows.block_tables,
        work.tiles,
        work.shares_begin,
        work.cut,
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
        MERGED=MERGED_OF_WARP * cut.warps,
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
    finished,
    tables,
    tiles,
    shares_begin,
    cut,
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
    MERGED: tl.constexpr,
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
    key_head = (column // HEAD_PARTS).to(tl.int64)
    share = shares_begin + tl.program_id(0) // columns
    begin, end = tl.load(share), tl.load(share + 1)

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

        is_first = state // 2 % 2 == 1
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
            partial = state // 4 - 1
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
                at = (partial.to(tl.int64) + query_index) * (num_key_heads * HEADS_OF_KEY) + head
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

    if begin < end:
        _merge_rows(
            out,
            partials,
            sums,
            finished + column,
            tiles,
            cut,
            sinks,
            begin,
            end,
            key_head * HEADS_OF_KEY,
            column % HEAD_PARTS * HEAD_TILE,
            out_n,
            out_h,
            partial_rows,
            columns,
            num_key_heads * HEADS_OF_KEY,
            HEADS_OF_KEY,
            HEAD_TILE,
            VALUE_DIM,
            VALUE_TILE,
            MERGED,
            HAS_SINKS,
        )


@triton.jit(noinline=True)
def _merge_rows(
    out,
    partials,
    sums,
    counters,
    tiles,
    cut,
    sinks,
    begin,
    end,
    first_head,
    first_of_key,
    out_n,
    out_h,
    partial_rows,
    columns: tl.constexpr,
    num_heads: tl.constexpr,
    HEADS_OF_KEY: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    MERGED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the queries of a part whose spans are complete.

    A function that is called: compiled into the kernel, it made the loop over tiles 7 % slower.
    """
    tl.debug_barrier()  # all threads have stored their partial answers
    # Other programs may have spans of the queries at both ends of the part; those between are complete.
    entry, last_entry = tiles + begin * TILE_WORDS, tiles + (end - 1) * TILE_WORDS
    num_queries, spans, index, count, first = _read_span(entry)
    last_queries, last_spans, last_index, last_count, last = _read_span(last_entry)
    last_first = end - 1 - last_index
    stop = last + tl.where(last_spans // SPANS % SPANS > 1, last_queries, 0)
    if (last_first > begin) & (last_first + last_count > end):
        num_done = last_spans % SPANS - last_spans // (SPANS * SPANS) + 1
        if not _complete(counters + last * columns, num_done, last_spans):
            stop = last
    if (index > 0) | (begin - index + count > end):
        last_slot = spans // SPANS % SPANS - 1
        if begin - index + count >= end:
            last_slot = last_spans % SPANS
        if not _complete(counters + first * columns, last_slot - spans % SPANS + 1, spans):
            first += num_queries
    heads: tl.constexpr = triton.next_power_of_2(HEAD_TILE)
    at_once: tl.constexpr = MERGED // (heads * VALUE_TILE) if heads * VALUE_TILE < MERGED else 1
    slots: tl.constexpr = 8 if heads * VALUE_TILE <= MERGED else 1
    lane = tl.arange(0, at_once * heads)
    head_of_key = first_of_key + lane % heads
    head = first_head + head_of_key
    value_dim = tl.arange(0, VALUE_TILE)
    for number in range(first, stop, at_once):
        query = number + lane // heads
        is_query = (lane % heads < HEAD_TILE) & (head_of_key < HEADS_OF_KEY) & (query < stop)
        is_value = is_query[:, None] & (value_dim < VALUE_DIM)[None, :]
        token = tl.load(cut + 2 * query, mask=is_query, other=0).to(tl.int64)
        num_spans = tl.load(cut + 2 * query + 1, mask=is_query, other=0)
        largest = tl.full([at_once * heads], float("-inf"), tl.float32)
        total = tl.zeros([at_once * heads], tl.float32)
        if HAS_SINKS:
            largest = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        answer = tl.zeros([at_once * heads, VALUE_TILE], tl.float32)
        for slot in range(0, tl.max(num_spans, 0), slots):
            for more in tl.static_range(slots):  # loads of all of them begin before the first is used
                is_span = is_query & (slot + more < num_spans)
                at = ((slot + more) * partial_rows + query) * num_heads + head
                # Not from the first-level cache, into which other processors do not write.
                under = tl.load(sums + at, mask=is_span, other=float("-inf"), cache_modifier=".cg")
                part_at = partials + at[:, None] * VALUE_DIM + value_dim[None, :]
                part = tl.load(part_at, mask=is_value & is_span[:, None], other=0.0, cache_modifier=".cg")
                now = tl.maximum(largest, under)
                base = tl.where(now == float("-inf"), 0.0, now)
                weight = tl.exp2(under - base)
                before = tl.exp2(largest - base)
                # Fused as written: left to the compiler, it depended on the row's place among those merged at once.
                total = tl.fma(total, before, weight)
                answer = tl.fma(part, weight[:, None] + tl.zeros_like(part), answer * before[:, None])
                largest = now
        answer /= tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + (token * out_n + head * out_h)[:, None] + value_dim[None, :]
        tl.store(target, answer.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def _complete(counter, num_done, spans):
    """Count spans that this program has stored; return whether all spans of their queries are stored by now."""
    num_before = tl.atomic_add(counter, num_done, sem="acq_rel")
    is_complete = num_before + num_done == spans // SPANS % SPANS - spans // (SPANS * SPANS)
    if is_complete:
        tl.store(counter, 0)  # for the next layer
    return is_complete


@triton.jit
def _read(tiles, number):
    """Load the words of a tile that its loads need, and whether it ends a span."""
    entry = tiles + number.to(tl.int64) * TILE_WORDS
    return (
        tl.load(entry),
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
        tl.load(entry + 5),
    )


@triton.jit
def _read_span(entry):
    """Load the words of a tile on its queries: their number, spans, tiles before it, all tiles, place among the cut."""
    return tl.load(entry + 2), tl.load(entry + 6), tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)


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
