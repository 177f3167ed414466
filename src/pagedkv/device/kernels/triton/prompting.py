"""Attention of prompts: items of many queries, each with all the keys that it sees, distributed over programs.

Rows of a tile are queries times the heads that share a key head. So a short chunk fills a tile, and there are few keys
between the positions of its first and last query. Keys that all queries see need no mask, so they have a loop of their
own, apart from the loops over the keys at both ends.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedkv.device.kernels.inputs import (
    ITEM_WORDS as ITEM_WORDS_,
    NO_PARTIAL as NO_PARTIAL_,
    PagedLayer,
    PagedRows,
    WorkList,
)
from pagedkv.device.kernels.triton.launching import Launch
from pagedkv.device.kernels.triton.overlapping import launch_options
from pagedkv.device.kernels.triton.scores import capped, divisor, is_seen, may_be_seen, share_beside_sink, weigh

ITEM_WORDS = tl.constexpr(ITEM_WORDS_)
NO_PARTIAL = tl.constexpr(NO_PARTIAL_)


def attend_items(
    work: WorkList,
    layer: PagedLayer,
    rows: PagedRows,
    query: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    launch: Launch,
) -> None:
    """Compute attention of a list's items."""
    cut, heads_of_key, num_key_heads = work.tiling, work.reading.heads_of_key, layer.keys.shape[2]
    head_tile = min(heads_of_key, cut.query_rows)
    head_parts = triton.cdiv(heads_of_key, head_tile)
    _items_kernel[(launch.num_processors * cut.query_programs,)](
        query,
        layer.keys,
        layer.values,
        out,
        work.partials,
        work.sums,
        rows.block_tables,
        work.items,
        work.counts,
        query if sinks is None else sinks,
        *launch.scales,
        *query.stride()[:2],
        *layer.keys.stride()[:3],
        *layer.values.stride()[:3],
        *out.stride()[:2],
        rows.block_tables.stride(0),
        work.few_rows,
        launch.scale,
        layer.soft_cap,
        num_key_heads=num_key_heads,
        HEADS_OF_KEY=heads_of_key,
        HEAD_PARTS=head_parts,
        HEAD_TILE=head_tile,
        ROWS=max(16, triton.next_power_of_2(head_tile * work.tokens_of_item)),
        KEY_TILE=cut.query_keys,
        **launch.constants,
        ARE_ALIKE=layer.keys.stride()[:3] == layer.values.stride()[:3],
        **({"maxnreg": cut.query_registers} if cut.query_registers else {}),
        num_warps=cut.query_warps,
        num_stages=cut.query_stages,
        **launch_options(overlaps=launch.overlaps),
    )


@triton.jit
def _items_kernel(
    query,
    keys,
    values,
    out,
    partials,
    sums,
    tables,
    items,
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
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
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
    ARE_ALIKE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    columns: tl.constexpr = num_key_heads * HEAD_PARTS
    num_items = tl.load(counts + 1) * columns
    row = tl.arange(0, ROWS)
    query_index = row // HEAD_TILE
    dim = tl.arange(0, DIM)
    rest = DIM + tl.arange(0, REST if REST > 0 else 1)
    value_dim = tl.arange(0, VALUE_TILE)
    # Items are distributed back and forth: the first round in ascending order of programs, the next in descending
    # order. Items are sorted by their ends, so a program with more work in one round has less in the next.
    num_programs = tl.num_programs(0)
    rounds = num_items // num_programs
    last_seat = tl.where(rounds % 2 == 0, tl.program_id(0), num_programs - 1 - tl.program_id(0))
    rounds += tl.where(last_seat < num_items - rounds * num_programs, 1, 0)
    for turn in range(rounds):
        seat = tl.where(turn % 2 == 0, tl.program_id(0), num_programs - 1 - tl.program_id(0))
        number = turn * num_programs + seat
        entry = items + number // columns * ITEM_WORDS
        column = number % columns
        key_head = (column // HEAD_PARTS).to(tl.int64)
        place = tl.load(entry)
        token = tl.load(entry + 1).to(tl.int64)
        num_queries = tl.load(entry + 2)
        position = tl.load(entry + 3)
        first_key = tl.load(entry + 4)
        end_key = tl.load(entry + 5)
        partial = tl.load(entry + 6)
        table = tables + place.to(tl.int64) * table_n
        keys_here, values_here = keys + key_head * key_h, values + key_head * value_h
        head_of_key = column % HEAD_PARTS * HEAD_TILE + row % HEAD_TILE
        head = key_head * HEADS_OF_KEY + head_of_key
        is_row = (head_of_key < HEADS_OF_KEY) & (query_index < num_queries)
        query_at = query + ((token + query_index) * query_n + head * query_h)[:, None]
        asked = tl.load(query_at + dim[None, :], mask=is_row[:, None] & (dim < KEY_DIM)[None, :], other=0.0)
        if REST > 0:
            asked_more = tl.load(query_at + rest[None, :], mask=is_row[:, None] & (rest < KEY_DIM)[None, :], other=0.0)
        else:
            asked_more = asked
        factor = scale
        if IS_SCALED:
            factor = scale * tl.load(key_scales + key_head * scale_step)

        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        answer = tl.zeros([ROWS, VALUE_TILE], tl.float32)
        # Keys that every query sees: from the first key of the last query to the position of the first query.
        low, high = first_key, first_key
        if WINDOW == 0 and CHUNK == 0:
            high = tl.minimum(position + 1, end_key) // KEY_TILE * KEY_TILE
            high = tl.maximum(high, first_key)
        for phase in tl.static_range(3):
            if phase == 0:
                begin, stop = 0, tl.minimum(SINK_TOKENS, first_key)
            elif phase == 1:
                begin, stop = low, high
            else:
                begin, stop = high, end_key
            if phase > 0 or SINK_TOKENS > 0:
                for first in range(begin, stop, KEY_TILE):
                    key = first + tl.arange(0, KEY_TILE)
                    if phase != 1:
                        is_key = (key < stop) & may_be_seen(key, position, WINDOW, CHUNK, SINK_TOKENS)
                    if phase == 1:
                        block = tl.load(table + key // BLOCK_SIZE)
                    else:
                        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
                    offset = key % BLOCK_SIZE
                    if IS_FAR:
                        offset = offset.to(tl.int64)
                    at = block.to(tl.int64) * key_b + offset * key_n
                    key_at = keys_here + at[:, None]
                    if phase == 1 and DIM <= KEY_DIM:
                        content = tl.load(key_at + dim[None, :])
                    elif phase == 1:
                        content = tl.load(key_at + dim[None, :], mask=(dim < KEY_DIM)[None, :], other=0.0)
                    else:
                        content = tl.load(
                            key_at + dim[None, :], mask=is_key[:, None] & (dim < KEY_DIM)[None, :], other=0.0
                        )
                    products = tl.dot(asked, tl.trans(content.to(asked.dtype)), input_precision=PRECISION)
                    if REST > 0:
                        if phase == 1:
                            more = tl.load(key_at + rest[None, :], mask=(rest < KEY_DIM)[None, :], other=0.0)
                        else:
                            more = tl.load(
                                key_at + rest[None, :], mask=is_key[:, None] & (rest < KEY_DIM)[None, :], other=0.0
                            )
                        products = tl.dot(
                            asked_more, tl.trans(more.to(asked.dtype)), products, input_precision=PRECISION
                        )
                    scores, times = products, factor
                    if HAS_CAP:
                        scores, times = capped(products, factor, soft_cap)
                    if phase != 1:
                        seen = is_seen(key[None, :], (position + query_index)[:, None], WINDOW, CHUNK, SINK_TOKENS)
                        scores = tl.where(seen & is_key[None, :], scores, float("-inf"))
                    weights, largest, total, before = weigh(scores, times, largest, total)
                    if IS_LATENT:
                        held = content
                    else:
                        if not ARE_ALIKE:
                            at = block.to(tl.int64) * value_b + offset * value_n
                        value_at = values_here + at[:, None]
                        if phase == 1 and VALUE_TILE == VALUE_DIM:
                            held = tl.load(value_at + value_dim[None, :])
                        elif phase == 1:
                            held = tl.load(
                                value_at + value_dim[None, :], mask=(value_dim < VALUE_DIM)[None, :], other=0.0
                            )
                        else:
                            is_value = is_key[:, None] & (value_dim < VALUE_DIM)[None, :]
                            held = tl.load(value_at + value_dim[None, :], mask=is_value, other=0.0)
                    answer = answer * before[:, None]
                    answer = tl.dot(weights.to(asked.dtype), held.to(asked.dtype), answer, input_precision=PRECISION)

        share = 1.0 / tl.where(total == 0.0, 1.0, total)
        if HAS_SINKS:
            whole = share_beside_sink(largest, total, tl.load(sinks + head, mask=is_row, other=0.0))
            share = tl.where(partial == NO_PARTIAL, whole, share)
        if IS_SCALED:
            share *= tl.load(value_scales + key_head * scale_step)
        scaled = answer * share[:, None]
        is_value = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
        if partial == NO_PARTIAL:
            target = out + ((token + query_index) * out_n + head * out_h)[:, None] + value_dim[None, :]
            tl.store(target, scaled.to(out.dtype.element_ty), mask=is_value)
        else:
            slot = tl.load(entry + 7).to(tl.int64)
            at = (slot * partial_rows + partial + query_index) * (num_key_heads * HEADS_OF_KEY) + head
            tl.store(partials + at[:, None] * VALUE_DIM + value_dim[None, :], scaled, mask=is_value)
            tl.store(sums + at, divisor(largest, total), mask=is_row)
