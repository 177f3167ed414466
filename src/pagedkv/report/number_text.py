"""Formats of numbers: each quantity has one, used in tables, tiles and differences alike.

Units and rounding are defined here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["COUNT", "GIB", "MEAN", "NONE", "RATIO", "SECONDS", "Unit", "compact", "edge", "rate", "relative"]

NONE: Final = "none"
"""Shown in place of a missing value; screen readers can read it."""

NBYTES_OF_GIB: Final = 2**30
MANY_SECONDS: Final = 100
MILLI: Final = 1e-3
FEW_PER_S: Final = 10
PREFIXES: Final = (("T", 1e12), ("G", 1e9), ("M", 1e6))
LARGEST_PREFIXED: Final = 1e15


@dataclass(frozen=True, slots=True)
class Unit:
    """A format for a quantity.

    Args:
        write: formats a value.
        write_size: formats the size of a difference, without its sign.
    """

    write: Callable[[float], str]
    write_size: Callable[[float], str]

    def text(self, value: float | None) -> str:
        """Format a value; ``NONE`` without one.

        >>> COUNT.text(1234567), RATIO.text(0.1842), SECONDS.text(0.0125), SECONDS.text(None)
        ('1,234,567', '18.42%', '12.5 ms', 'none')
        """
        return NONE if value is None else self.write(value)

    def difference(self, difference: float) -> str:
        """Format a difference with its sign.

        >>> COUNT.difference(-3), RATIO.difference(0.0125), SECONDS.difference(1.5), COUNT.difference(0)
        ('-3', '+1.25 points', '+1.50 s', '0')
        """
        return f"{'+' if difference > 0 else '-' if difference < 0 else ''}{self.write_size(abs(difference))}"


def relative(difference: float, first: float) -> str:
    """Format a difference as a share of the first value; empty if that value is 0.

    >>> relative(5, 20), relative(5, 0)
    ('+25.0%', '')
    """
    return f"{difference / first:+,.1%}" if first else ""


def rate(per_s: float) -> str:
    """Format a number a second: as a whole number, unless it is small.

    >>> rate(12345.6), rate(0.152), rate(0)
    ('12,346', '0.15', '0')
    """
    return f"{per_s:,.0f}" if per_s >= FEW_PER_S else f"{per_s:.2g}"


def compact(value: float) -> str:
    """Format a number in little space, for an axis.

    >>> compact(0.25), compact(250_000), compact(2_500_000), compact(1e20)
    ('0.25', '250,000', '2.5M', '1e+20')
    """
    if abs(value) >= LARGEST_PREFIXED:
        return f"{value:.3g}"
    for prefix, scale in PREFIXES:
        if abs(value) >= scale:
            return f"{value / scale:g}{prefix}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def edge(upper_s: float | None, lower_s: float | None) -> str:
    """Format the bucket of ages from above ``lower_s`` up to ``upper_s`` seconds.

    >>> edge(0, None), edge(5, 2), edge(None, 10000)
    ('0', '2-5', '> 10,000')
    """
    if upper_s is None:
        return f"> {lower_s or 0:,g}"
    return f"{upper_s:,g}" if lower_s is None else f"{lower_s:,g}-{upper_s:,g}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else f"{value:,}"


def _seconds(value: float) -> str:
    if value >= MANY_SECONDS:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= MILLI:
        return f"{value / MILLI:.1f} ms"
    return f"{value / MILLI**2:.0f} us" if value else "0 s"


def _gib(nbytes: float) -> str:
    return f"{nbytes / NBYTES_OF_GIB:,.2f} GiB"


COUNT: Final = Unit(_count, _count)
MEAN: Final = Unit(lambda value: f"{value:,.1f}", lambda value: f"{value:,.1f}")
RATIO: Final = Unit(lambda value: f"{value:.2%}", lambda value: f"{100 * value:,.2f} points")
SECONDS: Final = Unit(_seconds, _seconds)
GIB: Final = Unit(_gib, _gib)
