"""Gumbel noise without a state: a hash of seed, sample, position and token id.

The index of the greatest ``logit / temperature + noise`` is a sample of the softmax (E. J. Gumbel, *Statistical Theory
of Extreme Values*, 1954; C. J. Maddison, D. Tarlow, T. Minka, "A* Sampling", 2014, section 2). Since the noise depends
on these four numbers alone, a request draws the same tokens in any batch, after any preemption, and for any number of
positions that one step samples. Two machines may draw different tokens only if the difference between the two greatest
sums is smaller than the rounding differences of their logits.

The hash is SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014, section 3, with the constants of its final version): a counter, and a mixing function::

    key(seed, sample, position) = word(word(word(seed, 0), sample), position)
    word(key, counter)          = mix(key + (counter + 1) * GAMMA)

so the words of a position's tokens are the stream of SplitMix64 seeded with its key. The arithmetic is int64 with
wrap-around, so every device computes the same bits.
"""

from typing import Final

import torch

__all__ = ["GREATEST_NOISE", "gumbel", "keys_of", "run_words", "seed_of", "words"]

GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR: Final = 0x94D049BB133111EB - 2**64
"""The constants of SplitMix64, as signed integers, for tensors of int64."""

UNUSED_BITS: Final = 12
"""52 bits of a word are used: float64 has the middle of each interval exactly, so no logarithm is taken of 0 or 1."""

GREATEST_NOISE: Final = 36.75
"""No noise is above this: -log(-log(1 - 2**-53)) is 36.74."""


def words(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Hash keys and counters, int64 each: int64 of their broadcast shape.

    Cost: eleven passes over the result. Memory: a second array of its size.
    """
    return _mix_(keys + (counters + 1) * GAMMA)


def seed_of(seed: int, number: int) -> int:
    """Derive the seed of request ``number`` from one seed for many requests: 0 to 2**63 - 1."""
    word = int(words(torch.tensor([seed], dtype=torch.int64), torch.tensor([number], dtype=torch.int64))[0])
    return word & (2**63 - 1)


def run_words(keys: torch.Tensor, firsts: torch.Tensor, length: int) -> torch.Tensor:
    """Hash runs of ``length`` counters; keys and first counters: int64 ``[n]``.

    Returns words, int64 ``[n, length]``. Cost: that of :func:`words`.
    """
    steps = torch.arange(1, length + 1, device=keys.device) * GAMMA
    return _mix_((keys + firsts * GAMMA)[:, None] + steps)


def _mix_(word: torch.Tensor) -> torch.Tensor:
    """Mix words in place. Torch's right shift of signed integers copies the sign bit, so these bits are masked out."""
    shifted = torch.empty_like(word)
    for count, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR), (31, 1)):
        torch.bitwise_right_shift(word, count, out=shifted)
        word ^= shifted.bitwise_and_((1 << (64 - count)) - 1)
        if factor != 1:
            word *= factor
    return word


def keys_of(seeds: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute the key of each row from seeds, samples and positions; all are int64 ``[rows]``."""
    return words(words(words(seeds, torch.zeros_like(seeds)), samples), positions)


def gumbel(word: torch.Tensor) -> torch.Tensor:
    """Turn words into standard Gumbel noise, float64. Noise grows with the word, up to rounding."""
    uniform = ((word >> UNUSED_BITS).double() + (2.0**51 + 0.5)) * 2.0**-52
    return -torch.log(-torch.log(uniform))
