"""Filters on a GPU: thresholds found bit by bit, without sorting and without the host.

The bits of a score are mapped to an integer, so that integers have the order of scores. The threshold of top-k is the
greatest integer that at least k scores reach; that of top-p is the greatest integer such that the scores that reach it
have enough probability mass. Each pass determines two bits: it counts what each of three candidates would keep. One
program processes a row; a row without filters is not read.

Only a few of a row's scores are candidates for its threshold. These are collected first, in three readings of the row
from the second-level cache, and the passes read only them::

    lanes     l0 l1 l2 ... | l0 l1 l2 ... | ...         a tile after the other: lane i has each tile's i-th score
    maxima    of every lane; the n-th greatest of them is a bound that at least n scores of the row reach
    numbers   of scores that reach the bound, by lane; with top-p alone the mass of all scores
    kept      those scores, lane after lane

For top-k, n is k. For top-p alone it is :data:`LIKELIEST`. If more than ``ROOM`` scores reach the bound, or if these
scores do not have enough of the mass, the passes read the whole row.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from pagedkv.device.kernels.inputs import Filters

TILE: Final = 4096
WARPS: Final = 16
ROOM: Final = 2048
"""Most scores of a row that can be collected."""
SIGN = tl.constexpr(0x80000000)
HIGHEST = tl.constexpr(2**30)
"""The lower of the two bits that the first pass determines."""
PASSES = tl.constexpr(16)
LIKELIEST = tl.constexpr(1024)


def find_least(filters: Filters, scores: torch.Tensor, out: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.find_least`."""
    num_rows, num_tokens = scores.shape
    if scores.numel() == 0:
        return
    tile = min(TILE, triton.next_power_of_2(num_tokens))
    kept = torch.empty(num_rows, ROOM, dtype=torch.float32, device=scores.device)
    _least_kernel[(num_rows,)](
        scores, *filters, out, kept, scores.stride(0), num_tokens, TILE=tile, ROOM=ROOM, num_warps=WARPS
    )


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
    """Return how many of the three candidates keep enough."""
    enough = (tl.sum(one, 0) >= wanted).to(tl.uint32) + (tl.sum(two, 0) >= wanted).to(tl.uint32)
    return enough + (tl.sum(three, 0) >= wanted).to(tl.uint32)


@triton.jit
def _weights(value, top, temperature, least):
    """Return the unnormalised probabilities of scores; 0 for those below ``least``."""
    return tl.where(value >= least, tl.exp((value - top) / temperature), 0.0).to(tl.float64)


@triton.jit
def _kth_of(place, is_there, wanted):
    """Return the greatest integer that at least ``wanted`` of these reach."""
    lowest = tl.full([], 0, tl.uint32)
    step = tl.full([], HIGHEST, tl.uint32)
    for _ in range(PASSES):
        one = (is_there & (place >= lowest + step)).to(tl.int32)
        two = (is_there & (place >= lowest + 2 * step)).to(tl.int32)
        three = (is_there & (place >= lowest + 3 * step)).to(tl.int32)
        lowest += _reached(one, two, three, wanted) * step
        step = step >> 2
    return lowest


@triton.jit
def _share_of(place, weight, wanted):
    """Return the greatest integer such that the scores that reach it have at least the mass ``wanted``."""
    lowest = tl.full([], 0, tl.uint32)
    step = tl.full([], HIGHEST, tl.uint32)
    for _ in range(PASSES):
        one = tl.where(place >= lowest + step, weight, 0.0)
        two = tl.where(place >= lowest + 2 * step, weight, 0.0)
        three = tl.where(place >= lowest + 3 * step, weight, 0.0)
        lowest += _reached(one, two, three, wanted) * step
        step = step >> 2
    return lowest


@triton.jit
def _kth_of_row(mine, num_tokens, wanted, TILE: tl.constexpr):
    """As :func:`_kth_of`, over a whole row."""
    lowest = tl.full([], 0, tl.uint32)
    step = tl.full([], HIGHEST, tl.uint32)
    for _ in range(PASSES):
        one, two, three = (tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32))
        for begin in range(0, num_tokens, TILE):
            place = _place_of(_load(mine, begin, num_tokens, TILE))
            is_token = begin + tl.arange(0, TILE) < num_tokens
            one += (is_token & (place >= lowest + step)).to(tl.int32)
            two += (is_token & (place >= lowest + 2 * step)).to(tl.int32)
            three += (is_token & (place >= lowest + 3 * step)).to(tl.int32)
        lowest += _reached(one, two, three, wanted) * step
        step = step >> 2
    return lowest


@triton.jit
def _share_of_row(mine, num_tokens, top, temperature, least, wanted, TILE: tl.constexpr):
    """As :func:`_share_of`, over a whole row."""
    lowest = tl.full([], 0, tl.uint32)
    step = tl.full([], HIGHEST, tl.uint32)
    for _ in range(PASSES):
        one, two, three = (tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64))
        for begin in range(0, num_tokens, TILE):
            value = _load(mine, begin, num_tokens, TILE)
            place = _place_of(value)
            weight = _weights(value, top, temperature, least)
            one += tl.where(place >= lowest + step, weight, 0.0)
            two += tl.where(place >= lowest + 2 * step, weight, 0.0)
            three += tl.where(place >= lowest + 3 * step, weight, 0.0)
        lowest += _reached(one, two, three, wanted) * step
        step = step >> 2
    return lowest


@triton.jit
def _mass_of_row(mine, num_tokens, top, temperature, least, TILE: tl.constexpr):
    mass = tl.zeros([TILE], tl.float64)
    for begin in range(0, num_tokens, TILE):
        mass += _weights(_load(mine, begin, num_tokens, TILE), top, temperature, least)
    return tl.sum(mass, 0)


@triton.jit
def _numbers_that_reach(mine, num_tokens, bound, TILE: tl.constexpr):
    """Count by lane the scores that reach a bound."""
    numbers = tl.zeros([TILE], tl.int32)
    for begin in range(0, num_tokens, TILE):
        is_token = begin + tl.arange(0, TILE) < num_tokens
        numbers += (is_token & (_place_of(_load(mine, begin, num_tokens, TILE)) >= bound)).to(tl.int32)
    return numbers


@triton.jit
def _collect(mine, num_tokens, bound, numbers, kept, TILE: tl.constexpr):
    """Store the scores that reach a bound, lane after lane."""
    at = tl.cumsum(numbers, 0) - numbers
    for begin in range(0, num_tokens, TILE):
        value = _load(mine, begin, num_tokens, TILE)
        reaches = (begin + tl.arange(0, TILE) < num_tokens) & (_place_of(value) >= bound)
        tl.store(kept + at, value, mask=reaches)
        at += reaches.to(tl.int32)
    tl.debug_barrier()  # other threads of the program read them


@triton.jit
def _least_kernel(
    scores, temperatures, top_k, top_p, min_p, out, kept, score_n, num_tokens, TILE: tl.constexpr, ROOM: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    mine = scores + row * score_n
    room = kept + row * ROOM
    temperature = tl.load(temperatures + row)
    is_drawn = temperature > 0.0
    count = tl.load(top_k + row)
    share = tl.load(top_p + row)
    least_share = tl.load(min_p + row)
    has_top_k = is_drawn & (count > 0) & (count < num_tokens)
    has_top_p = is_drawn & (share < 1.0)
    least = tl.full([], float("-inf"), tl.float32)
    if has_top_k | has_top_p | (is_drawn & (least_share > 0.0)):
        maxima = tl.full([TILE], float("-inf"), tl.float32)
        for begin in range(0, num_tokens, TILE):
            maxima = tl.maximum(maxima, _load(mine, begin, num_tokens, TILE))
        top = tl.max(maxima, 0)
        if has_top_k | has_top_p:
            wide = tl.where(has_top_k, count, LIKELIEST)
            lane = tl.arange(0, TILE)
            bound = _kth_of(_place_of(maxima), lane < num_tokens, wide)
            numbers = _numbers_that_reach(mine, num_tokens, bound, TILE)
            num_kept = tl.sum(numbers, 0)
            fits = num_kept <= ROOM
            place = tl.arange(0, ROOM)
            values = tl.full([ROOM], float("-inf"), tl.float32)
            if fits:
                _collect(mine, num_tokens, bound, numbers, room, TILE)
                values = tl.load(room + place, mask=place < num_kept, other=float("-inf"))
            if has_top_k:
                if fits:
                    least = _score_at(_kth_of(_place_of(values), place < num_kept, count))
                else:
                    least = _score_at(_kth_of_row(mine, num_tokens, count, TILE))
            if has_top_p:
                weights = tl.where(place < num_kept, _weights(values, top, temperature, least), 0.0)
                mass = tl.sum(weights, 0)
                wanted = mass * share
                if (has_top_k & fits) == 0:  # else the collected scores include all that top-k keeps
                    wanted = _mass_of_row(mine, num_tokens, top, temperature, least, TILE) * share
                if fits & (mass >= wanted):
                    least = tl.maximum(least, _score_at(_share_of(_place_of(values), weights, wanted)))
                else:
                    at = _share_of_row(mine, num_tokens, top, temperature, least, wanted, TILE)
                    least = tl.maximum(least, _score_at(at))
        if is_drawn & (least_share > 0.0):
            least = tl.maximum(least, top + temperature * tl.log(least_share))
    tl.store(out + row, least)
