"""Parses the text of a line into typed values, within limits that hold for every format.

JSON types are exact: a boolean, a text or a fraction is not a whole number, and NaN is not JSON. Values that types
allow (negative, absurd, infinite) are checked here, before anything is sized by them.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.traces.lines import Line

__all__ = [
    "FIX_THE_ROW",
    "MAX_ARRIVAL_S",
    "MAX_LENGTH",
    "MAX_TOKEN_ID",
    "Lengths",
    "SessionName",
    "check_range",
    "check_row",
    "checked_tokens",
    "converted",
    "decoded",
    "decoded_strictly",
    "without_thousands",
]

MAX_LENGTH: Final = 2**24
"""Longest accepted prompt or output: beyond any context window, and still cheap to hold."""
MAX_ARRIVAL_S: Final = 10**11
"""Some 3,000 years: above times since 1970, below garbage."""
MAX_SESSION_CHARACTERS: Final = 1000
"""Longest name of a session. Names are remembered, so a damaged one must not fill the memory."""
MAX_TOKEN_ID: Final = 2**31 - 1
FIX_THE_ROW: Final = "Repair or remove the row"
MOST_DIGITS: Final = 40  # digits of an absurd number that a message shows
EXTENSION_PREFIX: Final = "x_"
THOUSANDS: Final = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+", re.ASCII)

SessionName = Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARACTERS)]


class Lengths(msgspec.Struct):
    """The lengths in rows of all foreign formats."""

    input_length: int
    output_length: int


_T = TypeVar("_T")


def decoded(line: Line, kind: type[_T]) -> _T:
    """Parse a JSON line into ``kind``; keys that ``kind`` does not have are ignored, unless it forbids them.

    Raises:
        TraceError: the line is not JSON, or not of that kind.
    """
    try:
        return msgspec.json.decode(line.text, type=kind)
    except msgspec.ValidationError as error:
        raise line.fault(str(error), FIX_THE_ROW) from error
    except msgspec.DecodeError as error:
        raise line.fault(f"not a whole JSON object: {error}", FIX_THE_ROW) from error
    except RecursionError as error:
        raise line.fault("values are nested too deeply", FIX_THE_ROW) from error


def decoded_strictly(line: Line, kind: type[_T]) -> _T:
    """Parse a JSON line into ``kind``, which forbids unknown keys, except those that begin with ``x_``.

    Raises:
        TraceError: the line is not JSON, not of that kind, or has an unknown key.
    """
    try:
        return msgspec.json.decode(line.text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        values = decoded(line, dict[str, msgspec.Raw])
    known = {key: value for key, value in values.items() if not key.startswith(EXTENSION_PREFIX)}
    return decoded(Line(line.path, line.number, msgspec.json.encode(known).decode()), kind)


def converted(line: Line, cells: dict[str, str], kind: type[_T]) -> _T:
    """Read the named cells of a CSV line as the numbers that ``kind`` declares.

    Raises:
        TraceError: a cell is not such a number.
    """
    try:
        return msgspec.convert(cells, kind, strict=False)
    except msgspec.ValidationError as error:
        raise line.fault(str(error), FIX_THE_ROW) from error


def without_thousands(number: str) -> str:
    """Remove the commas between thousands; anything else is unchanged.

    >>> [without_thousands(number) for number in ("1,234,567", "1,2", "12")]
    ['1234567', '1,2', '12']
    """
    return number.replace(",", "") if "," in number and THOUSANDS.fullmatch(number) else number


def check_row(line: Line, row: Lengths, arrival_s: float, where: str = "") -> None:
    """Refuse lengths and a time that are negative, absurd or not finite. Raises TraceError."""
    check_range(line, f"{where}input_length", row.input_length, 1, MAX_LENGTH)
    check_range(line, f"{where}output_length", row.output_length, 0, MAX_LENGTH)
    check_range(line, f"{where}the arrival in seconds", arrival_s, 0, MAX_ARRIVAL_S)


def checked_tokens(line: Line, token_ids: Sequence[object]) -> Int32Array:
    """Make an array of tokens, each a whole number from 0 to 2^31 - 1. Raises TraceError."""
    for token in token_ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise line.fault(f"a token is {token!r:.40}, but must be from 0 to {MAX_TOKEN_ID}", FIX_THE_ROW)
    return np.array(token_ids, np.int32)


def check_range(line: Line, name: str, value: float, least: int, most: int) -> None:
    """Refuse a number outside ``[least, most]``. Raises TraceError."""
    if not least <= value <= most:
        raise line.fault(f"{name} is {str(value)[:MOST_DIGITS]}, but must be from {least} to {most}", FIX_THE_ROW)
