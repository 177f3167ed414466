"""Noise and draws on a GPU: bounds of all sums in float32, then the sums that may be the greatest.

Words are 64-bit integers and sums float64, as in plain torch: draws differ only if two sums are closer than the
logarithms of the two libraries. Logarithms in float64 are slow, and nearly all of a row's sums are far below the
greatest. So one kernel finds for each tile of a row a number that no sum of the tile exceeds, from the first 32 bits of
words, by at most 0.05 and a millionth too great. Another takes the tiles in the order of these bounds, and ends where
the next bound is below the greatest sum that was found: after one or two tiles. The host is not involved, so a draw can
be captured.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from pagedkv.device.kernels.inputs import (
    FACTORS as FACTORS_,
    GAMMA as GAMMA_,
    NO_TOKEN as NO_TOKEN_,
    SHIFTS as SHIFTS_,
    UNUSED_BITS as UNUSED_BITS_,
    Draws,
)

GAMMA = tl.constexpr(GAMMA_)
FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(factor) for factor in FACTORS_)
FIRST_SHIFT, SECOND_SHIFT, THIRD_SHIFT = (tl.constexpr(shift) for shift in SHIFTS_)
UNUSED_BITS = tl.constexpr(UNUSED_BITS_)
NO_TOKEN = tl.constexpr(NO_TOKEN_)
AFTER_ALL_IDS = tl.constexpr(2**31 - 1)
TILE: Final = 1024
GREATEST_NOISE = tl.constexpr(36.75)
"""Above the noise of every word: 53 bits times log(2)."""
COARSE = tl.constexpr(16.0)
"""Numbers of 32 bits below which the distance of a word from the greatest is known too coarsely for a bound."""
SMALL = tl.constexpr(0.03)
"""Distances from 1 below which a logarithm is taken for the distance: it is greater, by less than a 60th."""
SLACK = tl.constexpr(0.05)
PRECISION = tl.constexpr(2.0**-20)


def noise_words(draws: Draws, first: int, out: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.noise_words`."""
    num_rows, num_tokens = out.shape
    if out.numel() == 0:
        return
    _words_kernel[(num_rows, triton.cdiv(num_tokens, TILE))](
        draws.seeds, draws.samples, draws.positions, out, out.stride(0), first, num_tokens, TILE=TILE
    )


def draw_tokens(draws: Draws, scores: torch.Tensor, out: torch.Tensor, greatest: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.draw_tokens`."""
    num_rows, num_tokens = scores.shape
    if num_rows == 0:
        return
    num_tiles = triton.cdiv(num_tokens, TILE)
    bounds = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=scores.device)
    _bound_kernel[(num_rows, num_tiles)](scores, *draws, *bounds, scores.stride(0), num_tokens, num_tiles, TILE=TILE)
    _pick_kernel[(num_rows,)](
        scores,
        *draws,
        *bounds,
        out,
        greatest,
        scores.stride(0),
        num_tokens,
        num_tiles,
        TILE=TILE,
        TILES=triton.next_power_of_2(num_tiles),
    )


@triton.jit
def _mixed(word):
    word = (word ^ (word >> FIRST_SHIFT)) * FIRST_FACTOR
    word = (word ^ (word >> SECOND_SHIFT)) * SECOND_FACTOR
    return word ^ (word >> THIRD_SHIFT)


@triton.jit
def _word(key, counter):
    """Hash; unsigned, so that shifts insert zeros."""
    return _mixed(key + (counter.to(tl.uint64) + 1) * GAMMA)


@triton.jit
def _key_of(seeds, samples, positions, row):
    seed = tl.load(seeds + row).to(tl.uint64)
    key = _word(seed, seed * 0)
    key = _word(key, tl.load(samples + row))
    return _word(key, tl.load(positions + row))


@triton.jit
def _words_kernel(seeds, samples, positions, out, out_n, first, num_tokens, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = _word(_key_of(seeds, samples, positions, row), index.to(tl.int64) + first)
    tl.store(out + row * out_n + index, word.to(tl.int64, bitcast=True), mask=index < num_tokens)


@triton.jit
def _bound_kernel(
    scores,
    temperatures,
    least,
    seeds,
    samples,
    positions,
    bounds,
    tops,
    score_n,
    num_tokens,
    num_tiles,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    value = tl.load(scores + row * score_n + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    is_in = (value >= tl.load(least + row)) & (value > float("-inf"))
    bound = tl.where(is_in, value, 0.0)
    if temperature != 0.0:
        word = _word(_key_of(seeds, samples, positions, row), token)
        below = ((word >> 32).to(tl.uint32) ^ 0x7FFFFFFF).to(tl.float32)  # from the word to the greatest: it is signed
        distance = (below + 0.5) * (2.0**-32)
        surprise = tl.where(distance < SMALL, distance, -tl.log(tl.maximum(1.0 - distance, 2.0**-24)))
        noise = tl.where(below < COARSE, GREATEST_NOISE, -tl.log(surprise) + SLACK)
        bound = bound / temperature + noise
    bound += tl.abs(bound) * PRECISION
    at = row * num_tiles + tile
    tl.store(bounds + at, tl.max(tl.where(is_in, bound, float("-inf")), 0))
    is_number = tl.min((value == value).to(tl.int32), 0) == 1
    tl.store(tops + at, tl.where(is_number, tl.max(value, 0), float("nan")))


@triton.jit
def _pick_kernel(
    scores,
    temperatures,
    least,
    seeds,
    samples,
    positions,
    bounds,
    tops,
    out,
    greatest,
    score_n,
    num_tokens,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    lowest = tl.load(least + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature).to(tl.float64)
    tiles = tl.arange(0, TILES)
    at = row * num_tiles + tiles
    top = tl.load(tops + at, mask=tiles < num_tiles, other=float("-inf"))
    bound = tl.load(bounds + at, mask=tiles < num_tiles, other=float("-inf"))
    highest = tl.where(tl.min((top == top).to(tl.int32), 0) == 1, tl.max(top, 0), float("nan"))
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], AFTER_ALL_IDS, tl.int32)
    next_bound = tl.max(bound, 0)
    while (next_bound > float("-inf")) & (next_bound.to(tl.float64) >= best):
        tile = tl.min(tl.where(bound == next_bound, tiles, TILES), 0)
        token = tile * TILE + tl.arange(0, TILE)
        value = tl.load(scores + row * score_n + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
        noise = tl.zeros([TILE], tl.float64)
        if temperature != 0.0:
            word = _word(_key_of(seeds, samples, positions, row), token).to(tl.int64, bitcast=True) >> UNUSED_BITS
            noise = -tl.log(-tl.log((word.to(tl.float64) + (2.0**51 + 0.5)) * (2.0**-52)))
        total = tl.where(value < lowest, float("-inf"), noise + value.to(tl.float64) / divisor)
        whole = tl.max(total, 0)
        found = tl.min(tl.where(total == whole, token, AFTER_ALL_IDS), 0)
        best_id = tl.where((whole > best) | ((whole == best) & (found < best_id)), found, best_id)
        best = tl.maximum(whole, best)
        bound = tl.where(tiles == tile, float("-inf"), bound)
        next_bound = tl.max(bound, 0)
    is_there = (highest < float("inf")) & (highest > float("-inf")) & (highest >= lowest)
    tl.store(out + row, tl.where(is_there, best_id, NO_TOKEN).to(tl.int64))
    tl.store(greatest + row, highest)
