"""Noise and draws in plain torch: every token is perturbed."""

from typing import Final

import torch

from pagedkv.device.drawing import FACTORS, GAMMA, NO_TOKEN, SHIFTS, UNUSED_BITS, Draws

__all__ = ["draw_tokens", "noise_words"]

NUM_WORDS: Final = 2**64
"""Number of different words. torch's words are signed, so constants are converted to the signed number of equal
bits."""


def noise_words(draws: Draws, first: int, out: torch.Tensor) -> None:
    """Hash consecutive token ids from ``first`` on: int64 ``[rows, tokens]``.

    Cost: O(rows x tokens).
    """
    token_ids = torch.arange(first, first + out.shape[1], device=out.device)
    out.copy_(_words(_keys(draws)[:, None], token_ids))


def draw_tokens(draws: Draws, scores: torch.Tensor, out: torch.Tensor) -> None:
    """Draw one token for each row.

    Args:
        draws: parameters of the draws.
        scores: float32, float16 or bfloat16 ``[rows, tokens]``, with contiguous tokens.
        out: int64 ``[rows]``; among equal sums the least id; NO_TOKEN if the row has no token.

    Cost: O(rows x tokens); every token is hashed.
    """
    values = scores.float()
    words = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    noise_words(draws, 0, words)
    uniform = ((words >> UNUSED_BITS).double() + (2.0**51 + 0.5)) * 2.0**-52
    is_greedy = draws.temperatures == 0
    divisors = torch.where(is_greedy, 1.0, draws.temperatures).double()
    noise = torch.where(is_greedy[:, None], 0.0, -torch.log(-torch.log(uniform)))
    sums = noise + values.double() / divisors[:, None]
    sums.masked_fill_(values < draws.least[:, None], -torch.inf)
    greatest = values.amax(dim=1)
    token_ids = (sums == sums.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    out.copy_(torch.where(torch.isfinite(greatest) & (greatest >= draws.least), token_ids, NO_TOKEN))


def _keys(draws: Draws) -> torch.Tensor:
    keys = _words(draws.seeds, torch.zeros_like(draws.seeds))
    return _words(_words(keys, draws.samples), draws.positions)


def _words(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    word = keys + (counters + 1) * _signed(GAMMA)
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        word ^= (word >> shift) & ((1 << (64 - shift)) - 1)  # torch's shift copies the sign bit
        word *= _signed(factor)
    return word


def _signed(constant: int) -> int:
    return constant - NUM_WORDS if constant >= NUM_WORDS // 2 else constant
