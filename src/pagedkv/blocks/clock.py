"""The caller's clock, which policies read. Only this module writes ``CLOCK_US`` and ``HAS_CLOCK``."""

from typing import Final

from pagedkv.blocks.blocks import CLOCK_US, HAS_CLOCK
from pagedkv.compilation.compiled import inlined
from pagedkv.contract.arrays import Int64Array

__all__ = ["advance_clock", "set_clock"]


MICROSECONDS: Final = 1_000_000  # a second


def advance_clock(counts: Int64Array, now_s: float) -> None:
    """Set the clock, in seconds; the caller has checked that it never decreases."""
    counts[CLOCK_US] = round(now_s * MICROSECONDS)
    counts[HAS_CLOCK] = 1


@inlined
def set_clock(counts: Int64Array, now_us: int) -> None:
    """Set the clock, in microseconds; the form of :func:`advance_clock` for compiled loops."""
    counts[CLOCK_US] = now_us
    counts[HAS_CLOCK] = 1
