"""Checks of callers' arguments, and their conversion to the types that the rest of the package uses.

All other code relies on these checks: a NumPy scalar of eight bits wraps around in the first addition, a plain array
made of a masked one loses the mask, and compiled loops check no bounds. Nothing here depends on state: whether a row
serves a sequence, or has a given length, is checked elsewhere.
"""

import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigurationError, PagedKVError, TokenError, UnknownSequenceError

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | memoryview | bytearray
"""Token ids as callers pass them: a NumPy array, a list, or any one-dimensional integer buffer."""
Rows: TypeAlias = int | Sequence[int] | npt.NDArray[np.integer]
"""Rows of the tables as callers pass them: one row, or a flat sequence or array of rows."""
LARGEST_SIZE: Final = 2**31 - 1
"""Largest int32, the type of ids, counts and positions."""
INT32: Final = np.dtype(np.int32)
NO_NUMBERS: Final = (bool, np.bool_, np.timedelta64)
"""Types that pass for numbers in Python or in NumPy, and are refused."""
UINT64: Final = np.dtype(np.uint64)
LARGEST_INT64: Final = 2**63 - 1


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
    if type(value) is int and least <= value <= most:
        return value
    if isinstance(value, NO_NUMBERS) or not isinstance(value, int | np.integer):
        raise error(f"{what} must be an integer, got {value!r}")
    number = int(value)
    if not least <= number <= most:
        bounds = f"at least {least}" if number < least else f"at most {most}"
        raise error(f"{what} must be {bounds}, got {number}")
    return number


def as_epoch(value: object, least: int = 0) -> int:
    """Check the number of an epoch of the weights. Raises ConfigurationError."""
    if isinstance(value, NO_NUMBERS) or not isinstance(value, int | np.integer):
        raise ConfigurationError(f"weights_epoch must be text or a whole number, got {value!r}")
    return as_count(value, "weights_epoch", least=least, most=LARGEST_SIZE - 1)


def as_flag(value: object, what: str, error: type[PagedKVError] = ConfigurationError) -> bool:
    """Check a truth value. Raises ConfigurationError (or ``error``) for any other type, numbers included."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{what} must be True or False, got {value!r}")
    return bool(value)


def as_number(value: object, what: str, error: type[PagedKVError] = ConfigurationError) -> float:
    """Check a finite number and return it as a plain ``float``. Raises ConfigurationError (or ``error``)."""
    if isinstance(value, NO_NUMBERS) or not isinstance(value, int | float | np.integer | np.floating):
        raise error(f"{what} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise error(f"{what} must be finite, got {value!r}")
    return number


def as_fraction(value: object, what: str) -> float:
    """Check a number in [0, 1). Raises ConfigurationError."""
    if isinstance(value, NO_NUMBERS) or not isinstance(value, int | float | np.floating) or not 0 <= value < 1:
        raise ConfigurationError(f"{what} must be in [0, 1), got {value!r}")
    return float(value)


def as_choice(value: object, choices: Collection[str], what: str) -> str:
    """Check that a value is one of several texts. Raises ConfigurationError with a list of them."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(f"{what} must be one of {tuple(choices)}, got {value!r}")
    return value


SHORT_DTYPES: Final = MappingProxyType({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"})


def dtype_name(name: str) -> str:
    """Return the one name of a type of numbers, for each of those in use; any other text as it is.

    >>> [dtype_name(name) for name in ("fp32", "torch.bfloat16", "float16", "auto")]
    ['float32', 'bfloat16', 'float16', 'auto']
    """
    plain = name.removeprefix("torch.")
    return SHORT_DTYPES.get(plain, plain)


def require_instance(value: object, kind: type, what: str, error: type[PagedKVError] = ConfigurationError) -> None:
    """Check the type of a value. Raises ConfigurationError (or ``error``)."""
    if not isinstance(value, kind):
        raise error(f"{what} must be a {kind.__name__}, got {type(value).__name__}")


def as_array(values: object, what: str, error: type[PagedKVError] = ConfigurationError) -> npt.NDArray[np.generic]:
    """Turn a caller's argument into a plain array, of any shape and type.

    Masked arrays are refused, even without a masked element: a plain array loses the mask, and the meaning of a masked
    number is unknown.

    Raises:
        ConfigurationError: (or ``error``) a masked array, or lists of lists of unequal lengths.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise error(f"{what} must be a plain array, got a masked one: give its compressed() or filled() numbers")
    try:
        return np.asarray(values)
    except (OverflowError, TypeError, ValueError) as problem:
        raise error(f"{what} are no array of integers: {problem}") from problem


def as_token_array(token_ids: TokenIds) -> npt.NDArray[np.int32]:
    """Turn token ids from any one-dimensional integer buffer or sequence into contiguous int32.

    Raises:
        TokenError: not one-dimensional, not integers, masked, or an id outside int32.
    """
    if type(token_ids) is np.ndarray:
        if token_ids.dtype == INT32 and token_ids.ndim == 1:
            return np.ascontiguousarray(token_ids)
    elif isinstance(token_ids, list | tuple):
        packed = _packed(token_ids)
        if packed is not None:
            return packed
    array = _as_integers(token_ids, "token ids", TokenError)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1:
        raise TokenError(f"token ids must be one-dimensional, got the shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers within int32, got the type {array.dtype}")
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        raise TokenError(f"token ids must lie within int32, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.int32)


def _packed(token_ids: "list[int] | tuple[int, ...]") -> npt.NDArray[np.int32] | None:
    """Turn plain integers within int32 into an array, and return None for all others.

    This takes 8 us for 1,024 integers, where NumPy takes 22. After None, NumPy is to convert the numbers or to report
    the error.
    """
    if not token_ids or type(token_ids[0]) is not int:
        return None
    try:
        packed = np.frombuffer(struct.pack(f"={len(token_ids)}i", *token_ids), np.int32)
    except struct.error:
        return None
    return None if _has_booleans(token_ids, packed) else packed


def _as_integers(values: object, what: str, error: type[PagedKVError]) -> npt.NDArray[np.generic]:
    """Turn an argument into an array as :func:`as_array` does, and refuse booleans beside integers in a list."""
    array = as_array(values, what, error)
    if (
        isinstance(values, list | tuple)
        and array.ndim == 1
        and array.dtype.kind in "iu"
        and _has_booleans(values, array)
    ):
        raise error(f"{what} must be integers, got True or False among them")
    return array


def _has_booleans(values: Sequence[object], array: npt.NDArray[np.generic]) -> bool:
    """Whether a list has True or False, of which an array that was made of it has made 1 and 0.

    Only elements that are 1 or 0 in the array are looked at: 1 us for 1,024 token ids.
    """
    places = np.flatnonzero((array == 0) | (array == 1)).tolist()
    return any(isinstance(values[place], bool | np.bool_) for place in places)


def as_batch(rows: Rows) -> npt.NDArray[np.int32]:
    """Turn one row, a list of rows or an array of rows into an int32 array."""
    if type(rows) is np.ndarray and rows.dtype == INT32 and rows.ndim == 1:
        return np.ascontiguousarray(rows)
    if type(rows) is int and 0 <= rows <= LARGEST_SIZE:
        return np.array([rows], np.int32)
    if isinstance(rows, list):
        packed = _packed(rows)
        if packed is not None and min(rows) >= 0:
            return packed.copy()
    batch = np.atleast_1d(_as_integers(rows, "rows", UnknownSequenceError))
    if batch.size == 0:
        return np.zeros(0, np.int32)
    if batch.ndim != 1 or batch.dtype.kind not in "iu":
        raise UnknownSequenceError(f"rows must be a flat array of integers, got {batch.dtype} {batch.shape}")
    if batch.min() < 0 or batch.max() > np.iinfo(np.int32).max:
        raise UnknownSequenceError(f"rows must not be negative or beyond int32, got {batch.min()} to {batch.max()}")
    return batch.astype(np.int32)


def as_counts(values: npt.ArrayLike, num_rows: int, what: str) -> npt.NDArray[np.int64]:
    """Turn one number a row into an array; the caller checks the range. Raises TokenError."""
    array = np.atleast_1d(_as_integers(values, what, TokenError))
    if array.shape != (num_rows,) or (array.size and array.dtype.kind not in "iu"):
        raise TokenError(f"{num_rows} rows need as many integer {what}, got {array.dtype} {array.shape}")
    if array.dtype == UINT64 and array.max(initial=0) > LARGEST_INT64:
        raise TokenError(f"{what} must lie within int64, got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def as_row(row: int) -> int:
    """Check one row's number. Raises UnknownSequenceError."""
    return as_count(row, "row", error=UnknownSequenceError)


def require(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    """Raise ConfigurationError unless a condition holds."""
    if not condition:
        raise ConfigurationError(message)


def check_count(spec: object, name: str, *, least: int = 1) -> None:
    """Check a count in a field of a frozen dataclass, and store it there as a plain integer."""
    object.__setattr__(spec, name, as_count(getattr(spec, name), name, least=least))


def check_flag(spec: object, name: str) -> None:
    """Raise ConfigurationError unless a field is True or False."""
    given = getattr(spec, name)
    require(isinstance(given, bool), f"{name} must be True or False, got {given!r}")


def short_repr(spec: Any) -> str:  # noqa: ANN401 - any dataclass
    """Write a specification as Python would build it, without fields that have their default value."""
    shown = [item for item in fields(spec) if item.init and getattr(spec, item.name) != item.default]
    return f"{type(spec).__name__}({', '.join(f'{item.name}={getattr(spec, item.name)!r}' for item in shown)})"
