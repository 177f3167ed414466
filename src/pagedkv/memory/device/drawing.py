"""Draws: what a step samples from, as kernels take it, and the noise that belongs to each token.

Scores are perturbed by noise that is a function of seed, sample, position and token id alone, and the greatest sum is
the token (E. J. Gumbel, 1954). The noise is a hash: SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014), a
counter and a mixing function::

    key(seed, sample, position) = word(word(word(seed, 0), sample), position)
    word(key, counter)          = mix(key + (counter + 1) * GAMMA)

It is integer arithmetic that wraps around: the same words on every device. Of a word 52 bits are used, whose middle is
exact in float64, so that no logarithm is taken of 0 or 1.
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
"""Token of a row whose greatest score is not finite: it is no number, or nothing may be drawn."""


class Draws(NamedTuple):
    """What each row of scores is drawn by, ``[rows]`` each, on the scores' device, read there when a graph is replayed.

    Args:
        temperatures: float32; 0: the greatest score is taken, the first of equal ones.
        least: float32, scores below it are not drawn; -inf: all may be.
        seeds, samples, positions: int64, what the noise belongs to, beside the token.
    """

    temperatures: torch.Tensor
    least: torch.Tensor
    seeds: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor


class Filters(NamedTuple):
    """Which of a row's greatest scores may be drawn, ``[rows]`` each, as above.

    Args:
        temperatures: float32; 0: nothing is filtered, the greatest is taken.
        top_k: int64, so many scores and those equal to the last; 0: all.
        top_p: float64, the fewest scores whose probabilities, of what top-k left, sum up to it; 1: all.
        min_p: float32, the least probability, of the greatest one's; 0: any.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
