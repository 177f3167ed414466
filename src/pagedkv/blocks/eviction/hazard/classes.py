"""Classes of similar runs: the features of a run when it is released, and its leaves in three trees.

========  ==============================================================================================
feature   meaning
========  ==============================================================================================
is_last   it is the last block of its sequence
uses      earlier uses of its blocks, at most 3
output    bit length of the number of generated tokens, at most 12; 0 also if that number is unknown
length    half the bit length of the number of new blocks, at most 7
gap       0 if no block of the sequence was known, else 1 + half the bit length of twice the seconds since the
          run of its last known block, at most 7
previous  0 if no block was known, else 1 + ``output`` of that run
========  ==============================================================================================

Trees: A by is_last, min(uses, 1), output, gap, and B by output, previous, with rates by seconds. F by is_last, uses,
length, with rates by blocks served. A *known* block is cached or a ghost, so features hardly depend on evictions.
"""

from pagedkv.blocks.eviction.hazard.layout import (
    GAP_CLASSES,
    LEAVES_A,
    LEAVES_B,
    LEAVES_F,
    LENGTH_CLASSES,
    OUTPUT_CLASSES,
    PREVIOUS_CLASSES,
    USE_CLASSES,
)
from pagedkv.compilation.compiled import inlined

__all__ = ["bit_length", "leaf_a", "leaf_b", "leaf_f", "output_of", "pack", "uses_of"]

BITS_A = 9
BITS_B = 8
BITS_F = 6


@inlined
def bit_length(number: int) -> int:
    """Return the bit length of a number that is not negative."""
    bits = 0
    while number > 0:
        number >>= 1
        bits += 1
    return bits


@inlined
def pack(is_last: int, uses: int, output: int, length: int, gap: int, previous: int) -> int:
    """Pack the three leaves of a run into one number."""
    in_a = ((2 * is_last + min(uses, 1)) * OUTPUT_CLASSES + output) * GAP_CLASSES + gap
    in_b = output * PREVIOUS_CLASSES + previous
    in_f = (USE_CLASSES * is_last + uses) * LENGTH_CLASSES + length
    return ((in_f << BITS_B | in_b) << BITS_A) | in_a


@inlined
def leaf_a(classes: int) -> int:
    """Return the leaf in tree A."""
    return LEAVES_A + (classes & ((1 << BITS_A) - 1))


@inlined
def leaf_b(classes: int) -> int:
    """Return the leaf in tree B."""
    return LEAVES_B + ((classes >> BITS_A) & ((1 << BITS_B) - 1))


@inlined
def leaf_f(classes: int) -> int:
    """Return the leaf in tree F."""
    return LEAVES_F + ((classes >> (BITS_A + BITS_B)) & ((1 << BITS_F) - 1))


@inlined
def uses_of(classes: int) -> int:
    """Return the earlier uses of a run's blocks."""
    return (leaf_f(classes) - LEAVES_F) // LENGTH_CLASSES % USE_CLASSES


@inlined
def output_of(classes: int) -> int:
    """Return the output class of the request that released a run."""
    return (leaf_b(classes) - LEAVES_B) // PREVIOUS_CLASSES
