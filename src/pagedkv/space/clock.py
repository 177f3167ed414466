"""The space's clock: the caller's seconds, by which leases end and eviction policies measure ages.

It is the core's only clock, and stands still between calls of ``advance``.
"""

import math
from numbers import Real
from typing import Final

from pagedkv.contract.arguments import NO_NUMBERS
from pagedkv.errors import ConfigurationError
from pagedkv.space.state import SpaceState

__all__ = ["advance", "as_lease_end", "as_time", "require_leases"]

LATEST_S: Final = 2.0**40  # so that microseconds fit in 64 bits


def as_time(state: SpaceState, now: object) -> float:
    """Check a time to which the clock is set. Raises ConfigurationError if it goes back, or is no time."""
    time = _as_seconds(now, "now")
    if time < state.now_s:
        raise ConfigurationError(f"the clock cannot go back from {state.now_s} to {time} seconds")
    return time


def _as_seconds(value: object, what: str) -> float:
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


def as_lease_end(state: SpaceState, until: object) -> float:
    """Check the end of a lease. Raises ConfigurationError if it is past or infinite."""
    require_leases(state)
    time = _as_seconds(until, "the end of a lease")
    if time <= state.now_s:
        raise ConfigurationError(
            f"a lease until {time} seconds would be over: the clock shows {state.now_s}; advance() sets it"
        )
    return time


def require_leases(state: SpaceState) -> None:
    """Raise ConfigurationError if the space keeps no leases."""
    if not state.config.leases:
        raise ConfigurationError("no leases are kept: set leases=True in the configuration")


def advance(state: SpaceState, now_s: float) -> None:
    """Set the clock. O(log leased blocks) for each block whose lease has ended."""
    state.is_changing = True
    state.now_s = now_s
    for pool in state.pools.values():
        pool.advance(now_s)
    for feature in state.features:
        feature.advanced(now_s)
    for observer in state.observers.advanced:
        observer.advanced(now_s)
    state.is_changing = False
