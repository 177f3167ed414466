"""Attention to latents with many heads on Hopper: items with explicit copies, products and waits (Gluon).

For 64 rows (heads, or queries times heads), one program multiplies 64 latents at a time, by two groups of four warps.
Triton's own pipeline starts to load the next latents after the last product of a tile; here they are loaded during all
of its products::

    copies      tile 1                 tile 2                 tile 3
    products    scores 0 | mixture 0 | scores 1 | mixture 1 | scores 2 | ...
    buffers     0                      1                      0

The scores of a tile are divided along the latents, half for each group of warps; the mixture along its dimensions. So
weights pass through shared memory, and no product is computed twice.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from pagedkv.device.kernels.inputs import (
    ITEM_WORDS as ITEM_WORDS_,
    NO_PARTIAL as NO_PARTIAL_,
    PagedLayer,
    PagedRows,
    WorkList,
)
from pagedkv.device.kernels.triton.launching import Launch, are_tokens_far

ITEM_WORDS = tl.constexpr(ITEM_WORDS_)
NO_PARTIAL = tl.constexpr(NO_PARTIAL_)
ROWS: Final = 64
KEY_TILE: Final = 64
WARPS: Final = 8
WIDEST: Final = 512
NARROWEST: Final = 256
"""Least dimensions of values; each group of warps mixes half of them."""
REST: Final = 64
VECTOR_NBYTES: Final = 16
HALF_TYPES: Final = (torch.bfloat16, torch.float16)

# Triton 3.9 and 3.6 have different names for two of these.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


def can_serve(work: WorkList, layer: PagedLayer, query: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Return whether this kernel supports a list's items."""
    key_dim, value_dim = layer.keys.shape[3], layer.values.shape[3]
    strides = (*layer.keys.stride()[:2], *query.stride()[:2])
    return (
        query.device.type == "cuda"
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and work.by_items
        and layer.is_latent
        and value_dim in {NARROWEST, WIDEST}
        and key_dim == value_dim + REST
        and work.tiling.query_rows == ROWS
        and query.dtype in HALF_TYPES
        and layer.keys.dtype is query.dtype
        and sinks is None
        and layer.soft_cap == 0
        and all(stride * query.element_size() % VECTOR_NBYTES == 0 for stride in strides)
        and all(each.data_ptr() % VECTOR_NBYTES == 0 for each in (layer.keys, query))
    )


def attend_latent_items(
    work: WorkList, layer: PagedLayer, rows: PagedRows, query: torch.Tensor, out: torch.Tensor, launch: Launch
) -> None:
    """Compute attention of a list's items."""
    heads_of_key = work.reading.heads_of_key
    head_tile = min(heads_of_key, ROWS)
    latent_kernel[(launch.num_processors,)](
        query,
        layer.keys,
        out,
        work.partials,
        work.sums,
        rows.block_tables,
        work.items,
        work.counts,
        *query.stride()[:2],
        *layer.keys.stride()[:2],
        *out.stride()[:2],
        rows.block_tables.stride(0),
        work.few_rows,
        launch.scale,
        NUM_HEADS=heads_of_key,
        HEAD_PARTS=triton.cdiv(heads_of_key, head_tile),
        HEAD_TILE=head_tile,
        BLOCK_SIZE=layer.keys.shape[1],
        IS_FAR=are_tokens_far(layer),
        DIM=layer.values.shape[3],
        num_warps=WARPS,
    )


@gluon.jit
def _look_up(table, first, end, BLOCK_SIZE: gl.constexpr, layout: gl.constexpr):
    """Return the block of each latent of a tile; the null block after the end."""
    key = first + gl.arange(0, 64, layout=layout)
    return gl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@gluon.jit
def _begin_copy(
    latents, block, first, end, key_b, key_n, buffer, begin, BLOCK_SIZE: gl.constexpr, IS_FAR: gl.constexpr,
    WIDTH: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Start to copy some dimensions of a tile's latents; zeros after the end."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    key = first + gl.arange(0, 64, layout=rows)
    offset = key % BLOCK_SIZE
    if IS_FAR:
        offset = offset.to(gl.int64)
    at = block.to(gl.int64) * key_b + offset * key_n
    dim = begin + gl.arange(0, WIDTH, layout=columns)
    copy_to_shared(buffer, latents + at[:, None] + dim[None, :], mask=(key < end)[:, None])


@gluon.jit
def latent_kernel(
    query,
    latents,
    out,
    partials,
    sums,
    tables,
    items,
    counts,
    query_n,
    query_h,
    key_b,
    key_n,
    out_n,
    out_h,
    table_n,
    partial_rows,
    scale,
    NUM_HEADS: gl.constexpr,
    HEAD_PARTS: gl.constexpr,
    HEAD_TILE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    IS_FAR: gl.constexpr,
    DIM: gl.constexpr,
):
    """Compute attention of items of 64 rows (queries times heads), distributed as in :mod:`.prompting`."""
    dtype: gl.constexpr = query.dtype.element_ty
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    scores_in: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    answer_in: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, DIM // 2, 16]
    )
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row_of_score: gl.constexpr = gl.SliceLayout(1, scores_in)
    row_of_answer: gl.constexpr = gl.SliceLayout(1, answer_in)
    key_rows: gl.constexpr = gl.SliceLayout(1, wide)
    rest_rows: gl.constexpr = gl.SliceLayout(1, narrow)

    asked = gl.allocate_shared_memory(dtype, [64, DIM], shared)
    asked_more = gl.allocate_shared_memory(dtype, [64, 64], shared)
    held = gl.allocate_shared_memory(dtype, [2, 64, DIM], shared)
    held_more = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    weighed = gl.allocate_shared_memory(dtype, [64, 64], shared)

    num_items = gl.load(counts + 1) * HEAD_PARTS
    num_programs = gl.num_programs(0)
    rounds = num_items // num_programs
    last_seat = gl.program_id(0)
    if rounds % 2 == 1:
        last_seat = num_programs - 1 - last_seat
    if last_seat < num_items - rounds * num_programs:
        rounds += 1
    for turn in range(rounds):
        seat = gl.program_id(0)
        if turn % 2 == 1:
            seat = num_programs - 1 - seat
        number = turn * num_programs + seat
        entry = items + number // HEAD_PARTS * ITEM_WORDS
        part = number % HEAD_PARTS
        place = gl.load(entry)
        token = gl.load(entry + 1).to(gl.int64)
        num_queries = gl.load(entry + 2)
        position = gl.load(entry + 3)
        first_key = gl.load(entry + 4)
        end_key = gl.load(entry + 5)
        partial = gl.load(entry + 6)
        slot = gl.load(entry + 7).to(gl.int64)
        table = tables + place.to(gl.int64) * table_n

        block = _look_up(table, first_key, end_key, BLOCK_SIZE, key_rows)
        rest_block = _look_up(table, first_key, end_key, BLOCK_SIZE, rest_rows)
        _begin_copy(latents, block, first_key, end_key, key_b, key_n, held.index(0), 0, BLOCK_SIZE, IS_FAR, DIM, wide)
        _begin_copy(
            latents,
            rest_block,
            first_key,
            end_key,
            key_b,
            key_n,
            held_more.index(0),
            DIM,
            BLOCK_SIZE,
            IS_FAR,
            64,
            narrow,
        )
        async_copy.commit_group()
        block = _look_up(table, first_key + 64, end_key, BLOCK_SIZE, key_rows)
        rest_block = _look_up(table, first_key + 64, end_key, BLOCK_SIZE, rest_rows)

        row = gl.arange(0, 64, layout=key_rows)
        head = (part * HEAD_TILE + row % HEAD_TILE).to(gl.int64)
        is_row = (head < NUM_HEADS) & (row // HEAD_TILE < num_queries)
        at = (token + row // HEAD_TILE) * query_n + head * query_h
        dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
        asked.store(gl.load(query + at[:, None] + dim[None, :], mask=is_row[:, None], other=0.0))
        row = gl.arange(0, 64, layout=rest_rows)
        head = (part * HEAD_TILE + row % HEAD_TILE).to(gl.int64)
        is_row = (head < NUM_HEADS) & (row // HEAD_TILE < num_queries)
        at = (token + row // HEAD_TILE) * query_n + head * query_h
        dim = DIM + gl.arange(0, 64, layout=gl.SliceLayout(0, narrow))
        asked_more.store(gl.load(query + at[:, None] + dim[None, :], mask=is_row[:, None], other=0.0))

        query_position = position + gl.arange(0, 64, layout=row_of_score) // HEAD_TILE
        largest = gl.full([64], float("-inf"), gl.float32, layout=row_of_score)
        total = gl.full([64], 0.0, gl.float32, layout=row_of_score)
        answer = gl.zeros([64, DIM], gl.float32, layout=answer_in)
        num_tiles = (end_key - first_key + 63) // 64
        for tile in range(num_tiles):
            first = first_key + tile * 64
            here = tile % 2
            # The other buffer's mixture is complete: all warps waited for it at the end of the previous iteration.
            _begin_copy(
                latents,
                block,
                first + 64,
                end_key,
                key_b,
                key_n,
                held.index(1 - here),
                0,
                BLOCK_SIZE,
                IS_FAR,
                DIM,
                wide,
            )
            _begin_copy(
                latents, rest_block, first + 64, end_key, key_b, key_n, held_more.index(1 - here), DIM, BLOCK_SIZE,
                IS_FAR, 64, narrow,
            )  # fmt: skip
            async_copy.commit_group()
            block = _look_up(table, first + 128, end_key, BLOCK_SIZE, key_rows)
            rest_block = _look_up(table, first + 128, end_key, BLOCK_SIZE, rest_rows)
            async_copy.wait_group(1)
            fence_async_shared()
            barrier()
            scores = gl.zeros([64, 64], gl.float32, layout=scores_in)
            scores = warpgroup_mma(asked, held.index(here).permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(asked_more, held_more.index(here).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if first + 64 > position:
                key = first + gl.arange(0, 64, layout=gl.SliceLayout(0, scores_in))
                seen = (key[None, :] <= query_position[:, None]) & (key < end_key)[None, :]
                scores = gl.where(seen, scores, float("-inf"))
            now = gl.maximum(largest, gl.max(scores, 1) * scale)
            base = gl.where(now == float("-inf"), 0.0, now)
            weights = gl.exp2(scores * scale - base[:, None])
            before = gl.exp2(largest - base)
            total = total * before + gl.sum(weights, 1)
            largest = now
            weighed.store(weights.to(dtype))
            fence_async_shared()
            barrier()
            answer = answer * gl.convert_layout(before, row_of_answer)[:, None]
            answer = warpgroup_mma(weighed, held.index(here), answer, is_async=True)
            answer = warpgroup_mma_wait(0, deps=[answer])
            barrier()
        async_copy.wait_group(0)

        is_none = total == 0.0
        divided = gl.where(is_none, 1.0, total)
        share = gl.convert_layout(1.0 / divided, row_of_answer)
        scaled = answer * share[:, None]
        row = gl.arange(0, 64, layout=row_of_answer)
        head = (part * HEAD_TILE + row % HEAD_TILE).to(gl.int64)
        is_row = (head < NUM_HEADS) & (row // HEAD_TILE < num_queries)
        dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, answer_in))
        if partial == NO_PARTIAL:
            out_at = (token + row // HEAD_TILE) * out_n + head * out_h
            gl.store(out + out_at[:, None] + dim[None, :], scaled.to(out.dtype.element_ty), mask=is_row[:, None])
        else:
            part_at = (slot * partial_rows + partial + row // HEAD_TILE) * NUM_HEADS + head
            gl.store(partials + part_at[:, None] * DIM + dim[None, :], scaled, mask=is_row[:, None])
            each = gl.arange(0, 64, layout=row_of_score)
            its_head = part * HEAD_TILE + each % HEAD_TILE
            is_sum = (its_head < NUM_HEADS) & (each // HEAD_TILE < num_queries)
            where = (slot * partial_rows + partial + each // HEAD_TILE) * NUM_HEADS + its_head
            gl.store(sums + where, gl.where(is_none, float("-inf"), largest + gl.log2(divided)), mask=is_sum)
        barrier()
