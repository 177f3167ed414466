"""Merges the partial answers of spans in the order of their slots; programs take tokens and heads in turn."""

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedkv.device.kernels.inputs import MERGE_WORDS as MERGE_WORDS_, WorkList
from pagedkv.device.kernels.triton.launching import Launch
from pagedkv.device.kernels.triton.overlapping import launch_options

MERGE_WORDS = tl.constexpr(MERGE_WORDS_)
LOG2_E = tl.constexpr(1.4426950408889634)
PROGRAMS: Final = 32
"""Programs for each multiprocessor: as many as fit, since they mostly wait for a few dependent loads."""


def merge_spans(work: WorkList, out: torch.Tensor, sinks: torch.Tensor | None, launch: Launch) -> None:
    """Merge the partial answers of a list."""
    value_dim = work.partials.shape[2]
    _merge_kernel[(launch.num_processors * PROGRAMS,)](
        out,
        work.partials,
        work.sums,
        work.merges,
        work.counts,
        out if sinks is None else sinks,
        *out.stride()[:2],
        num_heads=work.partials.shape[1],
        VALUE_DIM=value_dim,
        VALUE_TILE=triton.next_power_of_2(value_dim),
        SLOT_TILE=8,
        HAS_SINKS=sinks is not None,
        OVERLAPS=launch.overlaps,
        num_warps=4 if value_dim > 256 else 1,
        **launch_options(overlaps=launch.overlaps),
    )


@triton.jit
def _merge_kernel(
    out,
    partials,
    sums,
    merges,
    counts,
    sinks,
    out_n,
    out_h,
    num_heads: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SLOT_TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    num_merges = tl.load(counts + 2) * num_heads
    value_dim = tl.arange(0, VALUE_TILE)
    for number in range(tl.program_id(0), num_merges, tl.num_programs(0)):
        merge = number // num_heads
        head = number % num_heads
        entry = merges + MERGE_WORDS * merge
        token = tl.load(entry).to(tl.int64)
        num_spans = tl.load(entry + 1)
        at = tl.load(entry + 2).to(tl.int64) * num_heads + head
        apart = tl.load(entry + 3) * num_heads
        largest = float("-inf")
        total = 0.0
        if HAS_SINKS:
            largest = tl.load(sinks + head).to(tl.float32) * LOG2_E
            total = 1.0
        answer = tl.zeros([VALUE_TILE], tl.float32)
        for first in range(0, num_spans, SLOT_TILE):
            slot = first + tl.arange(0, SLOT_TILE)
            is_span = slot < num_spans
            where = at + slot.to(tl.int64) * apart
            under = tl.load(sums + where, mask=is_span, other=float("-inf"))
            part_at = partials + where[:, None] * VALUE_DIM + value_dim[None, :]
            part = tl.load(part_at, mask=is_span[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
            now = tl.maximum(largest, tl.max(under, 0))
            base = tl.where(now == float("-inf"), 0.0, now)
            weight = tl.exp2(under - base)
            before = tl.exp2(largest - base)
            total = total * before + tl.sum(weight, 0)
            answer = answer * before + tl.sum(part * weight[:, None], 0)
            largest = now
        answer /= total
        target = out + token * out_n + head.to(tl.int64) * out_h + value_dim
        tl.store(target, answer.to(out.dtype.element_ty), mask=value_dim < VALUE_DIM)
