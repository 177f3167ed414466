"""The space's clock: the caller's seconds, by which leases end and eviction policies measure ages.

It is the core's only clock, and stands still between calls of ``advance``.
"""

import math
from numbers import Real
from typing import Final

from pagedkv.memory.contract.arguments import NO_NUMBERS
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.pool.lease_victims import end_overdue
from pagedkv.memory.space.state import SpaceState

__all__ = ["advance", "as_seconds", "as_time"]

LATEST_S: Final = 2.0**40  # so that microseconds fit in 64 bits


def as_time(state: SpaceState, now: object) -> float:
    """Check a time to which the clock is set. Raises ConfigurationError if it goes back, or is no time."""
    time = as_seconds(now, "now")
    if time < state.now_s:
        raise ConfigurationError(f"the clock cannot go back from {state.now_s} to {time} seconds")
    return time


def as_seconds(value: object, what: str) -> float:
    """Check a time. Raises ConfigurationError if it is none."""
    message = f"{what} must be a number of seconds from 0 to {LATEST_S:.0f}, got {value!r}"
    if isinstance(value, NO_NUMBERS) or not isinstance(value, Real):
        raise ConfigurationError(message)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 <= seconds <= LATEST_S:
        raise ConfigurationError(message)
    return seconds


def advance(state: SpaceState, now_s: float) -> None:
    """Set the clock. Blocks whose leases have ended become ordinary cached blocks.

    O(log leased blocks) for each of them.
    """
    state.is_changing = True
    state.now_s = now_s
    for pool in state.pools.values():
        pool.advance(now_s)
        if state.config.leases:
            end_overdue(pool.arrays, now_s)
    for observer in state.observers:
        observer.advanced(now_s)
    state.is_changing = False
