"""Whole numbers as callers bring them: checked at the door and made plain Python integers.

A NumPy scalar of eight bits wraps around in the first addition, and compiled loops check no bounds, so no
number goes further in as it came.
"""

from typing import Final

import numpy as np

from pagedkv.errors import ConfigurationError, PagedKVError

__all__ = ["GIB", "LARGEST_SIZE", "as_count"]

GIB: Final = 2**30
"""Bytes of a GiB."""

LARGEST_SIZE: Final = 2**31 - 1
"""Ids, counts and positions are int32."""


def as_count(
    value: object,
    what: str,
    *,
    least: int = 0,
    most: int = LARGEST_SIZE,
    error: type[PagedKVError] = ConfigurationError,
) -> int:
    """Check a whole number and return it as a plain ``int``.

    Raises:
        ConfigurationError: (or ``error``) not an integer, or outside ``[least, most]``.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise error(f"{what} must be an integer, got {value!r}")
    number = int(value)
    if not least <= number <= most:
        bounds = f"at least {least}" if number < least else f"at most {most}"
        raise error(f"{what} must be {bounds}, got {number}")
    return number
