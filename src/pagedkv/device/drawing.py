"""Draws: the parameters of sampling for kernels, and the noise for each token.

Scores are perturbed by noise that depends only on seed, sample, position and token id, and the largest sum gives the
token (E. J. Gumbel, 1954). The noise is a hash: SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014), a counter
and a mixing function::

    key(seed, sample, position) = word(word(word(seed, 0), sample), position)
    word(key, counter)          = mix(key + (counter + 1) * GAMMA)

The integer arithmetic wraps around, so the words are the same on every device. 52 bits of a word are used; the midpoint
of their interval is exact in float64, so that no logarithm is taken of 0 or 1.
"""

from typing import Final, NamedTuple

import torch

__all__ = ["FACTORS", "GAMMA", "NO_TOKEN", "SHIFTS", "UNUSED_BITS", "Draws", "Filters"]

GAMMA: Final = 0x9E3779B97F4A7C15
FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS: Final = (30, 27, 31)
"""The constants of SplitMix64."""
UNUSED_BITS: Final = 12
NO_TOKEN: Final = -1
"""Token of a row whose largest score is not finite: it is NaN, or no token may be drawn."""


class Draws(NamedTuple):
    """Sampling parameters of each row of scores, ``[rows]`` each, on the scores' device; a replayed graph reads them.

    Args:
        temperatures: float32; 0: the largest score is taken, the first of equal ones.
        least: float32, the smallest score that may be drawn; -inf: all scores.
        seeds, samples, positions: int64, on which the noise depends, besides the token.
    """

    temperatures: torch.Tensor
    least: torch.Tensor
    seeds: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor


class Filters(NamedTuple):
    """Filters of each row's scores, ``[rows]`` each, on the scores' device.

    Args:
        temperatures: float32; 0: no filters apply, since the largest score is taken.
        top_k: int64, number of largest scores that may be drawn, with those equal to the last; 0: all.
        top_p: float64, only the fewest largest scores whose probabilities, after top-k, sum to at least this; 1: all.
        min_p: float32, the least probability, as a fraction of the largest one; 0: any.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
