"""Odd arguments for every parameter of every public method: what comes out must be an error of ours, or an answer.

One table a class says how each public method is called well; everything else follows from its signature. One argument
at a time is replaced by something odd. Whatever is annotated as a number, or as an array of numbers, must refuse what
is no whole number that fits, rather than narrow it to one.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import Rows, TokenIds
from pagedkv.contract.spec import Row, StepId
from pagedkv.errors import PagedKVError

__all__ = ["NO_ARRAYS", "ODD", "Call", "calls_of", "outcome", "parameters_of", "public_methods"]


class Unfriendly:
    """Refuses whatever is asked of it."""

    def __len__(self) -> int:
        raise RuntimeError("asked for its length")

    def __repr__(self) -> str:
        return "Unfriendly()"


WRAPPED: Final = 2**32 + 5
"""A five, to whoever takes its low word."""

NO_NUMBERS: Final[Mapping[str, object]] = {
    "a fraction": 1.5,
    "a whole float": 1.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "True": True,
    "text": "1",
    "bytes": b"1",
    "complex": 1j,
    "wrapped": WRAPPED,
    "int64 + 1": 2**63,
    "beyond all": 10**40,
    "beyond floats": 10**400,
    "most negative": -(2**63),
    "uint64": np.uint64(2**64 - 1),
    "wrapped int64": np.int64(WRAPPED),
    "float64": np.float64(1.0),
    "bool_": np.True_,
    "nan64": np.float64("nan"),
    "a list": [[1]],
    "a mapping": {1: 1},
    "an object": object(),
    "datetime": np.datetime64(1, "s"),
    "a time": np.timedelta64(1, "s"),
    "a time without unit": np.timedelta64(1),
    "unfriendly": Unfriendly(),
}
"""What is neither a number that fits int32, nor an array of such."""

NO_ARRAYS: Final[Mapping[str, object]] = {
    "fractions": [1.5],
    "whole floats": [1.0],
    "nans": [float("nan")],
    "bools": [True],
    "texts": ["1"],
    "wrapped numbers": [WRAPPED],
    "numbers beyond int64": [2**63],
    "numbers beyond all": [10**40],
    "numbers most negative": [-(2**63)],
    "nothings": [None],
    "ragged": [[1], [1, 2]],
    "float array": np.array([1.0]),
    "nan array": np.array([np.nan]),
    "bool array": np.array([True]),
    "wrapped int64 array": np.array([WRAPPED]),
    "wrapped uint64 array": np.array([2**64 - 1], np.uint64),
    "float16 array": np.array([1], np.float16),
    "object array": np.array([object()], object),
    "number objects": np.array([1, 2.5], object),
    "two dimensions": np.array([[1]]),
    "masked": np.ma.array([1], mask=[True]),
    "text array": np.array(["1"]),
    "time array": np.array([1], "m8[s]"),
    "record array": np.array([(1,)], [("a", "i4")]),
    "a set": {1},
    "a generator": (each for each in (1,)),
}
"""What is no flat array of numbers that fit int32."""

STRANGE: Final[Mapping[str, object]] = {
    "None": None,
    "an empty list": [],
    "an empty array": np.zeros(0),
    "an empty int array": np.zeros(0, np.int32),
    "an empty text": "",
    "an empty mapping": {},
    "minus one": -1,
    "zero": 0,
    "one": 1,
    "seven": 7,
    "ones": [1],
    "a surrogate": "\ud800",
    "a tuple": (1, 2),
    "a range": range(3),
    "a class": int,
    "a function": len,
    "zero dimensions": np.array(1),
    "large": 2**31 - 1,
    "larger": 2**31,
}
"""What may be right or wrong, and is answered in any case."""

ODD: Final[Mapping[str, object]] = {**NO_NUMBERS, **NO_ARRAYS, **STRANGE}


class Call(NamedTuple):
    """One call with one odd argument.

    Args:
        parameter: which; what: name of the odd value; value: that.
        must_refuse: whether no answer is right.
    """

    parameter: str
    what: str
    value: object
    must_refuse: bool


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Give the public methods of a class, its bases' and its class methods among them; no properties."""
    names = [name for name in dir(kind) if not name.startswith("_")]
    return {name: getattr(kind, name) for name in names if callable(getattr(kind, name))}


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Give the parameters of a function by name, ``self`` aside."""
    found = inspect.signature(function).parameters
    return {name: each for name, each in found.items() if name != "self"}


NUMBERS: Final = (int, int | None, Row, StepId)
ARRAYS: Final = (
    Rows,
    TokenIds,
    TokenIds | None,
    npt.ArrayLike,
    npt.ArrayLike | None,
    Sequence[int],
    list[int],
    Sequence[Sequence[int]],
)
FLAGS: Final = (bool,)


def refused_by(annotation: object) -> frozenset[str]:
    """Name what a parameter with this annotation must refuse."""
    if annotation in NUMBERS:
        return frozenset({*NO_NUMBERS, *NO_ARRAYS})
    if annotation in ARRAYS or (isinstance(annotation, str) and "ArrayLike" in annotation):
        return frozenset({*NO_ARRAYS, *NO_NUMBERS} - {"bytes"})
    if annotation in FLAGS:
        return frozenset({*NO_NUMBERS, *NO_ARRAYS, *STRANGE} - {"True", "bool_"})
    return frozenset()


def calls_of(function: Callable[..., Any], free: Mapping[str, frozenset[str]]) -> Iterator[Call]:
    """Give every call of a function with one odd argument; ``free`` names by parameter what is right after all."""
    for name, parameter in parameters_of(function).items():
        refused = refused_by(parameter.annotation)
        for what, value in ODD.items():
            must_refuse = what in refused and what not in free.get(name, frozenset())
            yield Call(name, what, value, must_refuse)


def outcome(call: Call, function: Callable[..., object], good: Mapping[str, object]) -> tuple[bool, str | None]:
    """Make a call, all arguments but one good: tell whether it answered, and what is wrong with what came of it."""
    try:
        answer = function(**{**good, call.parameter: call.value})
    except PagedKVError:
        return False, None
    except Exception as problem:  # noqa: BLE001 - what else there is is told
        return False, f"{call.parameter}={call.value!r}: {type(problem).__name__}: {problem}"
    if call.must_refuse:
        return True, f"{call.parameter}={call.value!r}: no error, but {answer!r:.60}"
    return True, None
