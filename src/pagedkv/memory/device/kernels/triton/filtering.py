"""Filters on a GPU: thresholds found bit by bit, without sorting and without the host.

The bits of a score are mapped to an integer of the same order. The threshold of top-k is the greatest integer that
enough scores reach; that of top-p is the greatest integer whose scores have enough of the mass. Each pass over the row
determines two bits: it counts what three candidates would keep. One program serves a row, which it reads from the
second-level cache; a row without filters is not read.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from pagedkv.memory.device.drawing import Filters

__all__ = ["find_least"]

TILE: Final = 4096
WARPS: Final = 16
SIGN = tl.constexpr(0x80000000)
HIGHEST = tl.constexpr(2**30)
"""The lower of the two bits that the first pass determines."""
PASSES = tl.constexpr(16)


def find_least(filters: Filters, scores: torch.Tensor, out: torch.Tensor) -> None:
    """As :func:`pagedkv.memory.device.kernels.reference.filtering.find_least`."""
    num_rows, num_tokens = scores.shape
    if scores.numel() == 0:
        return
    tile = min(TILE, triton.next_power_of_2(num_tokens))
    _least_kernel[(num_rows,)](scores, *filters, out, scores.stride(0), num_tokens, TILE=tile, num_warps=WARPS)


@triton.jit
def _load(scores, begin, num_tokens, TILE: tl.constexpr):
    token = begin + tl.arange(0, TILE)
    return tl.load(scores + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)


@triton.jit
def _place_of(value):
    """Return an unsigned integer for each score, in the order of scores."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ SIGN


@triton.jit
def _score_at(place):
    """Return the score with that integer."""
    ordered = (place ^ SIGN).to(tl.int32, bitcast=True)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _reached(one, two, three, wanted):
    """Return the number of the three candidates that keep enough."""
    enough = (tl.sum(one, 0) >= wanted).to(tl.uint32) + (tl.sum(two, 0) >= wanted).to(tl.uint32)
    return enough + (tl.sum(three, 0) >= wanted).to(tl.uint32)


@triton.jit
def _least_kernel(scores, temperatures, top_k, top_p, min_p, out, score_n, num_tokens, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mine = scores + row * score_n
    temperature = tl.load(temperatures + row)
    is_drawn = temperature > 0.0
    count = tl.load(top_k + row)
    share = tl.load(top_p + row)
    least_share = tl.load(min_p + row)
    least = tl.full([], float("-inf"), tl.float32)
    lowest = tl.full([], 0, tl.uint32)
    if is_drawn & (count > 0) & (count < num_tokens):
        step = tl.full([], HIGHEST, tl.uint32)
        for _ in range(PASSES):
            one, two, three = (tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32))
            for begin in range(0, num_tokens, TILE):
                place = _place_of(_load(mine, begin, num_tokens, TILE))
                is_token = begin + tl.arange(0, TILE) < num_tokens
                one += (is_token & (place >= lowest + step)).to(tl.int32)
                two += (is_token & (place >= lowest + 2 * step)).to(tl.int32)
                three += (is_token & (place >= lowest + 3 * step)).to(tl.int32)
            lowest += _reached(one, two, three, count) * step
            step = step >> 2
        least = _score_at(lowest)
    if is_drawn & ((share < 1.0) | (least_share > 0.0)):
        greatest = tl.full([TILE], float("-inf"), tl.float32)
        for begin in range(0, num_tokens, TILE):
            greatest = tl.maximum(greatest, _load(mine, begin, num_tokens, TILE))
        top = tl.max(greatest, 0)
        if share < 1.0:
            mass = tl.zeros([TILE], tl.float64)
            for begin in range(0, num_tokens, TILE):
                value = _load(mine, begin, num_tokens, TILE)
                weight = tl.exp((value - top) / temperature)
                mass += tl.where(value >= least, weight, 0.0).to(tl.float64)
            wanted = tl.sum(mass, 0) * share
            at = tl.full([], 0, tl.uint32)
            step = tl.full([], HIGHEST, tl.uint32)
            for _ in range(PASSES):
                first, second, third = (
                    tl.zeros([TILE], tl.float64),
                    tl.zeros([TILE], tl.float64),
                    tl.zeros([TILE], tl.float64),
                )
                for begin in range(0, num_tokens, TILE):
                    value = _load(mine, begin, num_tokens, TILE)
                    place = _place_of(value)
                    weight = tl.where(value >= least, tl.exp((value - top) / temperature), 0.0).to(tl.float64)
                    first += tl.where(place >= at + step, weight, 0.0)
                    second += tl.where(place >= at + 2 * step, weight, 0.0)
                    third += tl.where(place >= at + 3 * step, weight, 0.0)
                at += _reached(first, second, third, wanted) * step
                step = step >> 2
            least = tl.maximum(least, _score_at(at))
        if least_share > 0.0:
            least = tl.maximum(least, top + temperature * tl.log(least_share))
    tl.store(out + row, least)
