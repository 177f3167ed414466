"""Which runs are alike: what is known of a run when it is released, and the leaves of the three trees that follow.

========  ==============================================================================================
feature   meaning
========  ==============================================================================================
is_last   it is the last block of its sequence
uses      earlier uses of its blocks, at most 3
output    bit length of the number of generated tokens, at most 12; 0 also if nobody knows it
length    half the bit length of the number of blocks that were new, at most 7
gap       0 if nothing of the sequence was known, else 1 + half the bit length of twice the seconds since the
          run of its last known block, 7 at most
previous  0 if nothing was known, else 1 + ``output`` of that run
========  ==============================================================================================

Trees: A by is_last, min(uses, 1), output, gap, and B by output, previous: rates by seconds. F by is_last, uses, length:
rates by blocks served. What is *known* is cached or a ghost, so features hardly depend on what was evicted.
"""

from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.pool.eviction.hazard.layout import (
    GAP_CLASSES,
    LEAVES_A,
    LEAVES_B,
    LEAVES_F,
    LENGTH_CLASSES,
    OUTPUT_CLASSES,
    PREVIOUS_CLASSES,
    USE_CLASSES,
)

__all__ = ["bit_length", "leaf_a", "leaf_b", "leaf_f", "output_of", "pack", "uses_of"]

BITS_A = 9
BITS_B = 8
BITS_F = 6


@inlined
def bit_length(number: int) -> int:
    """Count the bits of a number that is not negative."""
    bits = 0
    while number > 0:
        number >>= 1
        bits += 1
    return bits


@inlined
def pack(is_last: int, uses: int, output: int, length: int, gap: int, previous: int) -> int:
    """Make one number of the three leaves that a run belongs to."""
    in_a = ((2 * is_last + min(uses, 1)) * OUTPUT_CLASSES + output) * GAP_CLASSES + gap
    in_b = output * PREVIOUS_CLASSES + previous
    in_f = (USE_CLASSES * is_last + uses) * LENGTH_CLASSES + length
    return ((in_f << BITS_B | in_b) << BITS_A) | in_a


@inlined
def leaf_a(classes: int) -> int:
    """Node of tree A."""
    return LEAVES_A + (classes & ((1 << BITS_A) - 1))


@inlined
def leaf_b(classes: int) -> int:
    """Node of tree B."""
    return LEAVES_B + ((classes >> BITS_A) & ((1 << BITS_B) - 1))


@inlined
def leaf_f(classes: int) -> int:
    """Node of tree F."""
    return LEAVES_F + ((classes >> (BITS_A + BITS_B)) & ((1 << BITS_F) - 1))


@inlined
def uses_of(classes: int) -> int:
    """Earlier uses of a run's blocks."""
    return (leaf_f(classes) - LEAVES_F) // LENGTH_CLASSES % USE_CLASSES


@inlined
def output_of(classes: int) -> int:
    """Output of the request that a run was released by."""
    return (leaf_b(classes) - LEAVES_B) // PREVIOUS_CLASSES
