"""Tokens on a GPU: writes a step's keys, values or latents to their slots, in eight bits if they are stored so."""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedkv.device.kernels.inputs import TokenSide
from pagedkv.device.kernels.reference import FP8_LARGEST
from pagedkv.device.kernels.triton.overlapping import launch_options, may_overlap

WIDEST: Final = 4096
"""Most elements of a token that a program holds at once."""
MANY: Final = 512
"""Number of elements from which a program has four warps."""


def write_tokens(sides: Sequence[TokenSide], slots: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.write_tokens`, both sides by one kernel."""
    first, second = sides[0], sides[-1]
    num_tokens, num_heads, dim = first.tokens.shape
    other_dim = second.tokens.shape[2]
    if num_tokens == 0:
        return
    overlaps = may_overlap(slots.device)
    dim_tile = triton.next_power_of_2(max(dim, other_dim))
    head_tile = max(1, min(triton.next_power_of_2(num_heads), WIDEST // dim_tile))
    _write_kernel[(num_tokens, triton.cdiv(num_heads, head_tile))](
        first.tokens,
        first.blocks,
        first.blocks if first.scales is None else first.scales,
        second.tokens,
        second.blocks,
        second.blocks if second.scales is None else second.scales,
        slots,
        *first.tokens.stride(),
        *first.blocks.stride(),
        *second.tokens.stride(),
        *second.blocks.stride(),
        dim,
        other_dim,
        first.blocks.shape[0] * first.blocks.shape[1],
        num_heads=num_heads,
        block_size=first.blocks.shape[1],
        scale_step=0 if first.scales is None or first.scales.shape[0] == 1 else 1,
        NUM_SIDES=len(sides),
        IS_SCALED=first.scales is not None,
        LARGEST=FP8_LARGEST.get(first.blocks.dtype, 0.0),
        HEAD_TILE=head_tile,
        DIM_TILE=dim_tile,
        OVERLAPS=overlaps,
        num_warps=4 if head_tile * dim_tile >= MANY else 1,
        **launch_options(overlaps=overlaps),
    )


@triton.jit
def _write_kernel(
    tokens,
    blocks,
    scales,
    others,
    other_blocks,
    other_scales,
    slots,
    token_n,
    token_h,
    token_c,
    block_b,
    block_n,
    block_h,
    block_c,
    other_n,
    other_h,
    other_c,
    other_block_b,
    other_block_n,
    other_block_h,
    other_block_c,
    dim,
    other_dim,
    num_slots,
    num_heads: tl.constexpr,
    block_size: tl.constexpr,
    scale_step: tl.constexpr,
    NUM_SIDES: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # In layouts with heads before blocks, the distance between heads is a whole part of the pool.
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]).to(tl.int64)
    at = tl.arange(0, DIM_TILE)[None, :]
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    # Both sides are read before either is written, and before the slot is known.
    slot = tl.load(slots + token)
    source = tokens + token * token_n + head * token_h + at * token_c
    content = tl.load(source, mask=(head < num_heads) & (at < dim), other=0.0)
    if NUM_SIDES > 1:
        source = others + token * other_n + head * other_h + at * other_c
        other = tl.load(source, mask=(head < num_heads) & (at < other_dim), other=0.0)
    num_written = tl.where((slot >= 0) & (slot < num_slots), num_heads, 0)
    block = slot // block_size
    offset = slot % block_size
    target = blocks + block * block_b + offset * block_n + head * block_h + at * block_c
    stored = _scaled(content, scales, head, num_heads, scale_step, IS_SCALED, LARGEST)
    tl.store(target, stored.to(blocks.dtype.element_ty), mask=(head < num_written) & (at < dim))
    if NUM_SIDES > 1:
        target = other_blocks + block * other_block_b + offset * other_block_n + head * other_block_h
        target += at * other_block_c
        stored = _scaled(other, other_scales, head, num_heads, scale_step, IS_SCALED, LARGEST)
        stored = stored.to(other_blocks.dtype.element_ty)
        tl.store(target, stored, mask=(head < num_written) & (at < other_dim))


@triton.jit
def _scaled(
    content,
    scales,
    head,
    num_heads: tl.constexpr,
    scale_step: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Divide by the scale, and limit the result to the largest number; NaN stays NaN."""
    if IS_SCALED:
        scale = tl.load(scales + head * scale_step, mask=head < num_heads, other=1.0)
        scaled = content.to(tl.float32) / scale
        bounded = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        content = tl.where(scaled == scaled, bounded, scaled)
    return content
