"""Noise and draws on a GPU: one kernel hashes and perturbs every token, another merges the parts of a row.

A vocabulary of 128k tokens is divided into parts, so that a few rows fill the device. The host is not involved, so a
draw can be captured. Words are 64-bit integers and sums float64, as in plain torch: draws differ only if two sums are
closer than the logarithms of the two libraries.
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
PART: Final = 4096
"""Tokens of a part: 32 parts of a vocabulary of 128k, so that 16 rows are 512 programs."""
TILE: Final = 1024


def noise_words(draws: Draws, first: int, out: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.noise_words`."""
    num_rows, num_tokens = out.shape
    if out.numel() == 0:
        return
    _words_kernel[(num_rows, triton.cdiv(num_tokens, TILE))](
        draws.seeds, draws.samples, draws.positions, out, out.stride(0), first, num_tokens, TILE=TILE
    )


def draw_tokens(draws: Draws, scores: torch.Tensor, out: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.draw_tokens`."""
    num_rows, num_tokens = scores.shape
    if num_rows == 0:
        return
    num_parts = triton.cdiv(num_tokens, PART)
    sums = torch.empty(num_rows, num_parts, dtype=torch.float64, device=scores.device)
    greatest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=scores.device)
    token_ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=scores.device)
    _draw_kernel[(num_rows, num_parts)](
        scores, *draws, sums, greatest, token_ids, scores.stride(0), num_tokens, num_parts, PART=PART, TILE=TILE
    )
    _merge_kernel[(num_rows,)](
        sums,
        greatest,
        token_ids,
        draws.least,
        out,
        num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=1,
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
    key = _key_of(seeds, samples, positions, row + tl.zeros([TILE], tl.int64))
    word = _word(key, index.to(tl.int64) + first)
    tl.store(out + row * out_n + index, word.to(tl.int64, bitcast=True), mask=index < num_tokens)


@triton.jit
def _draw_kernel(
    scores,
    temperatures,
    least,
    seeds,
    samples,
    positions,
    sums,
    greatest,
    token_ids,
    score_n,
    num_tokens,
    num_parts,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    lowest = tl.load(least + row)
    key = _key_of(seeds, samples, positions, row + tl.zeros([TILE], tl.int64))
    best = tl.full([TILE], float("-inf"), tl.float64)
    best_id = tl.full([TILE], AFTER_ALL_IDS, tl.int32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    for begin in range(0, PART, TILE):
        token = part * PART + begin + tl.arange(0, TILE)
        value = tl.load(scores + row * score_n + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
        noise = tl.zeros([TILE], tl.float64)
        divisor = temperature.to(tl.float64)
        if temperature != 0.0:
            word = _word(key, token).to(tl.int64, bitcast=True) >> UNUSED_BITS
            uniform = (word.to(tl.float64) + (2.0**51 + 0.5)) * (2.0**-52)
            noise = -tl.log(-tl.log(uniform))
        else:
            divisor += 1.0
        perturbed = noise + value.to(tl.float64) / divisor
        perturbed = tl.where(value < lowest, float("-inf"), perturbed)
        # Ids ascend from tile to tile, so an equal sum does not replace the first one.
        is_better = perturbed > best
        best_id = tl.where(is_better, token, best_id)
        best = tl.where(is_better, perturbed, best)
        top = tl.where((value > top) | (value != value), value, top)
    whole = tl.max(best, 0)
    at = row * num_parts + part
    is_number = tl.min((top == top).to(tl.int32), 0) == 1
    tl.store(sums + at, whole)
    tl.store(token_ids + at, tl.min(tl.where(best == whole, best_id, AFTER_ALL_IDS), 0))
    tl.store(greatest + at, tl.where(is_number, tl.max(top, 0), float("nan")))


@triton.jit
def _merge_kernel(sums, greatest, token_ids, least, out, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    is_part = part < num_parts
    at = row * num_parts + part
    found = tl.load(sums + at, mask=is_part, other=float("-inf"))
    whole = tl.max(found, 0)
    token = tl.load(token_ids + at, mask=is_part, other=AFTER_ALL_IDS)
    token = tl.min(tl.where(found == whole, token, AFTER_ALL_IDS), 0)
    top = tl.load(greatest + at, mask=is_part, other=float("-inf"))
    is_number = tl.min((top == top).to(tl.int32), 0) == 1
    highest = tl.max(top, 0)
    is_there = is_number & (highest < float("inf")) & (highest > float("-inf")) & (highest >= tl.load(least + row))
    tl.store(out + row, tl.where(is_there, token, NO_TOKEN).to(tl.int64))
