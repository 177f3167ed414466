"""Reading the values of axes, as typed in lists."""

from collections.abc import Callable
from typing import Final, TypeVar

from pagedkv.cli.sizes import parse_gib, parse_size
from pagedkv.errors import ConfigurationError
from pagedkv.routing import ROUTINGS
from pagedkv.simulation.planning.searching import HIGHEST_LOAD

__all__ = [
    "BY_NEED",
    "as_gib",
    "as_load",
    "as_num_replicas",
    "as_positive",
    "as_routing",
    "as_split",
    "listed",
    "size_of",
]

BY_NEED: Final = "need"
MOST_REPLICAS: Final = 64

_T = TypeVar("_T")


class _OutOfRangeError(ValueError):
    """A value that is a number out of range."""


def listed(option: str, text: str, read: Callable[[str], _T]) -> list[_T]:
    """Parse a list of an option. Raises ConfigurationError."""
    parts = [part.strip() for part in text.split(",")]
    try:
        values = [read(part) for part in parts if part]
    except ConfigurationError:
        raise  # a ValueError, too
    except _OutOfRangeError as error:
        raise ConfigurationError(f"{option}: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{option} must be a list of values such as 16,64, got {text!r:.60}") from error
    if not values or len(values) < len(parts) or len(set(values)) < len(values):
        raise ConfigurationError(f"{option} must be a list of different values, got {text!r:.60}")
    return values


def as_gib(text: str) -> float:
    """Parse a size of memory, in GiB. Raises ConfigurationError."""
    return parse_gib(text)


def as_positive(text: str) -> float:
    """Parse a number over 0. Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise _OutOfRangeError(f"each must be over 0 and finite, got {text:.60}")
    return value


def as_load(text: str) -> float:
    """Parse a multiple of the recorded traffic. Raises ValueError."""
    value = float(text)
    if value == 0:
        raise _OutOfRangeError(
            "at 0 times the recorded traffic no request ever arrives: give 1 for the traffic as recorded, or leave "
            "--load out, and the highest load that holds is searched for"
        )
    if not 0 < value <= HIGHEST_LOAD:
        raise _OutOfRangeError(
            f"each must be over 0 and at most {HIGHEST_LOAD:,.0f} times the recorded traffic, got {text:.60}: above it "
            "the whole trace arrives at once, which shows how fast a queue drains, not a sustained load"
        )
    return value


def as_num_replicas(text: str) -> int:
    """Parse a number of replicas. Raises ValueError."""
    number = int(text)
    if not 1 <= number <= MOST_REPLICAS:
        raise _OutOfRangeError(f"each must be from 1 to {MOST_REPLICAS}, got {text:.60}")
    return number


def as_routing(text: str) -> str:
    """Parse the name of a routing. Raises ValueError."""
    if text not in ROUTINGS:
        raise _OutOfRangeError(f"each must be one of {', '.join(ROUTINGS)}, got {text!r:.60}")
    return text


def size_of(option: str) -> Callable[[str], str]:
    """Return a reader of sizes, which stay as typed."""

    def read(text: str) -> str:
        parse_size(text, option)
        return text

    return read


def as_split(text: str) -> str:
    """Parse a factor of the memory of full attention, or ``need``. Raises ValueError."""
    return text if text == BY_NEED else f"{as_positive(text):g}"
