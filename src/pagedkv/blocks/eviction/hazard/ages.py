"""The age of a run, in ticks of the clock and in blocks served since, and its bin of ages.

Bins grow by the fourth root of two. The first ends at half a second (or 32 blocks), and the last has no end. Ages are
stored in 31 bits: 407 days of ticks. Without a clock, a block served counts as a tick.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.eviction.hazard.layout import (
    FIRST_REFERENCES,
    FIRST_SECONDS,
    IS_ON_CLOCK,
    NUM_REF_BINS,
    NUM_REFS,
    NUM_SECOND_BINS,
    REFS,
    SERIAL_MASK,
    TICK_OFFSET,
    TICKS,
    TICKS_PER_SECOND,
)
from pagedkv.blocks.record import CLOCK_US, HAS_CLOCK, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array

__all__ = ["age_in_refs", "age_in_seconds", "age_since", "bin_of_refs", "bin_of_seconds", "ticks_now"]

TICK_BITS: Final = 14  # of microseconds
MANTISSA_BITS: Final = 52  # of a double
MANTISSA: Final = (1 << MANTISSA_BITS) - 1
EXPONENT_OF_ONE: Final = 1023
QUARTERS: Final = tuple(int(np.float64(2.0 ** (quarter / 4)).view(np.int64)) & MANTISSA for quarter in (1, 2, 3))


@inlined
def ticks_now(pool: PoolArrays) -> int:
    """Return the current time."""
    if pool.counts[HAS_CLOCK] != pool.eviction[IS_ON_CLOCK]:
        _join_clocks(pool)
    if pool.counts[HAS_CLOCK]:
        return int((pool.counts[CLOCK_US] >> TICK_BITS) + pool.eviction[TICK_OFFSET])
    return int(pool.eviction[NUM_REFS])


@compiled
def _join_clocks(pool: PoolArrays) -> None:
    """Continue from the count of blocks, now that there is a clock."""
    pool.eviction[TICK_OFFSET] = pool.eviction[NUM_REFS] - (pool.counts[CLOCK_US] >> TICK_BITS)
    pool.eviction[IS_ON_CLOCK] = 1


@inlined
def age_since(start: int, now: int) -> int:
    """Return the time from ``start`` to ``now``, in the unit of both."""
    return int((now - int(start)) & SERIAL_MASK)


@inlined
def age_in_seconds(runs: Int32Array, slot: int, now: int) -> float:
    """Return the time since a run was released."""
    return float(age_since(runs[slot, TICKS], now)) / TICKS_PER_SECOND


@inlined
def age_in_refs(runs: Int32Array, slot: int, num_refs: int) -> int:
    """Return how many blocks were served since the request of a run."""
    return age_since(runs[slot, REFS], num_refs)


@inlined
def _bin_of(ratio: float, num_bins: int) -> int:
    """Find the bin of an age, given its ratio to the first bin's end: the exponent and the quarter of an octave.

    It is computed from the bits of the number without a branch: a call of ``frexp`` took 6 ns, and each choice of a
    victim looks up 128 bins.
    """
    bits = int(np.float64(ratio).view(np.int64))
    mantissa = bits & MANTISSA
    quarter = (mantissa >= QUARTERS[0]) + (mantissa >= QUARTERS[1]) + (mantissa >= QUARTERS[2])
    return int(max(0, min(1 + 4 * ((bits >> MANTISSA_BITS) - EXPONENT_OF_ONE) + quarter, num_bins - 1)))


@inlined
def bin_of_seconds(age_s: float) -> int:
    """Return the bin of an age in seconds."""
    return _bin_of(age_s / FIRST_SECONDS, NUM_SECOND_BINS)


@inlined
def bin_of_refs(age: int) -> int:
    """Return the bin of an age in blocks."""
    return _bin_of(age / FIRST_REFERENCES, NUM_REF_BINS)
