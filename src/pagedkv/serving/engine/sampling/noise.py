"""Gumbel noise that belongs to a token, not to a moment: a hash of seed, sample, position and token id.

The index of the greatest ``logit / temperature + noise`` is a sample of the softmax (E. J. Gumbel, *Statistical Theory
of Extreme Values*, 1954; C. J. Maddison, D. Tarlow, T. Minka, "A* Sampling", 2014, section 2). With noise that is a
function of these four numbers a request draws the same tokens whatever stands beside it in the batch, whatever was
computed again after a preemption, and however many positions one step samples; two machines differ only where the two
greatest sums are closer than their logits agree.

The hash is SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014, section 3, with the constants of its final version): a counter, and a mixing function::

    key(seed, sample, position) = word(word(word(seed, 0), sample), position)
    word(key, counter)          = mix(key + (counter + 1) * GAMMA)

so the words of a position's tokens are the stream of SplitMix64 seeded with its key. It is int64 arithmetic that wraps
around: the same bits on every device. Stateless: nothing here is remembered.
"""

from typing import Final

import torch

__all__ = ["GREATEST_NOISE", "gumbel", "keys_of", "run_words", "seed_of", "words"]

GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR: Final = 0x94D049BB133111EB - 2**64
"""The constants of SplitMix64, as the signed integers that torch has."""

UNUSED_BITS: Final = 12
"""Of a word 52 bits are used: their middle is exact in float64, so that no logarithm is taken of 0 or 1."""

GREATEST_NOISE: Final = 36.75
"""No noise is above this: -log(-log(1 - 2**-53)) is 36.74."""


def words(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Hash keys and counters, which broadcast: int64 of the shape that both have together.

    Cost: eleven passes over the answer, and a second array of its size meanwhile.
    """
    return _mix_(keys + (counters + 1) * GAMMA)


def seed_of(seed: int, number: int) -> int:
    """Derive a seed for one of many, from one seed for all of them: 0 to 2**63 - 1."""
    word = int(words(torch.tensor([seed], dtype=torch.int64), torch.tensor([number], dtype=torch.int64))[0])
    return word & (2**63 - 1)


def run_words(keys: torch.Tensor, firsts: torch.Tensor, length: int) -> torch.Tensor:
    """Hash runs of counters: keys and first counters int64 ``[n]`` give words int64 ``[n, length]``. Cost: as words."""
    steps = torch.arange(1, length + 1, device=keys.device) * GAMMA
    return _mix_((keys + firsts * GAMMA)[:, None] + steps)


def _mix_(word: torch.Tensor) -> torch.Tensor:
    """Mix words in place. Torch shifts signed integers only, so what it lets in from the left is masked out."""
    shifted = torch.empty_like(word)
    for count, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR), (31, 1)):
        torch.bitwise_right_shift(word, count, out=shifted)
        word ^= shifted.bitwise_and_((1 << (64 - count)) - 1)
        if factor != 1:
            word *= factor
    return word


def keys_of(seeds: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Make the key of each row: seeds, samples and positions are int64 ``[rows]``, and so is the answer."""
    return words(words(words(seeds, torch.zeros_like(seeds)), samples), positions)


def gumbel(word: torch.Tensor) -> torch.Tensor:
    """Turn words into standard Gumbel noise, float64; a greater word never has less noise by more than rounding."""
    uniform = ((word >> UNUSED_BITS).double() + (2.0**51 + 0.5)) * 2.0**-52
    return -torch.log(-torch.log(uniform))
