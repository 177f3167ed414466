"""The caller's clock, as policies read it. Owns ``CLOCK_US`` and ``HAS_CLOCK``."""

from typing import Final

from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.contract.arrays import Int64Array
from pagedkv.memory.pool.blocks import CLOCK_US, HAS_CLOCK

__all__ = ["advance_clock", "set_clock"]


MICROSECONDS: Final = 1_000_000  # a second


def advance_clock(counts: Int64Array, now_s: float) -> None:
    """Set the clock, in seconds; the caller has checked that it never goes back."""
    counts[CLOCK_US] = round(now_s * MICROSECONDS)
    counts[HAS_CLOCK] = 1


@inlined
def set_clock(counts: Int64Array, now_us: int) -> None:
    """Do what :func:`advance_clock` does, in a loop and in microseconds."""
    counts[CLOCK_US] = now_us
    counts[HAS_CLOCK] = 1
