"""The decorators of compiled loops, so that every loop is compiled in the same way.

The loops are plain Python over NumPy arrays. With ``NUMBA_DISABLE_JIT=1`` they run interpreted, can be
stepped through, and must give the same results (``make test`` and ``make test-plain``).
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from pagedkv.compilation.loop import Loop
from pagedkv.compilation.loop_cache import LoopCache

P = ParamSpec("P")
R = TypeVar("R")

REORDERED: Final = frozenset({"reassoc", "contract", "nsz", "arcp"})
"""Flags that change only a sum's last bits: without ``nnan`` and ``ninf``, since NaNs in the data must be detected."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop with Numba and keep the machine code on disk (``loop_cache.py``).

    The loop is compiled without Numba's run-time for reference counts (``_nrt=False``). A loop that would allocate
    memory then does not compile, and arrays pass between loops without an atomic increment each, which otherwise took
    90 of the 95 ns of releasing a block. Scratch memory is passed as an argument.
    """
    return _compile(function, forceinline=False)


def compiled_aside(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop of many milliseconds that runs without Python's lock, in parallel with others on other arrays."""
    return _compile(function, nogil=True)


def compiled_sums(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop with sums that may be reordered, so that it is vectorised. It runs without Python's lock."""
    return _compile(function, fastmath=set(REORDERED), nogil=True)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop, inlined into every loop that calls it.

    A call that is not inlined passes each array as seven or more words, which halved the speed of a decode
    step (20 us instead of 10 for 1,024 rows).
    """
    return _compile(function, forceinline=True)


def inlined_sums(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop with sums that may be reordered, inlined into every loop that calls it."""
    return _compile(function, forceinline=True, fastmath=set(REORDERED), nogil=True)


def _compile(function: Callable[P, R], **given: object) -> Callable[P, R]:
    if not is_compiling_at_all():
        return function
    loop = Loop(function, {"nopython": True, "boundscheck": None, "error_model": "numpy", "_nrt": False, **given})
    if function.__closure__ is None:  # its source determines it
        loop._cache = LoopCache(function)  # noqa: SLF001  # what ``cache=True`` sets, to Numba's own
    return cast("Callable[P, R]", loop)


def is_compiling_at_all() -> bool:
    """Whether loops are compiled, rather than interpreted."""
    return not cast("Any", numba).config.DISABLE_JIT


def specialize(loop: Callable[P, R], *examples: P.args, **_: P.kwargs) -> Callable[P, R]:
    """Return the machine code of a loop for arguments of exactly these types.

    Numba's dispatcher checks the type of every array at every call: 0.7 us for one tuple of eight arrays, where the
    machine code's own entry takes 0.06 us. For a decode step of a few rows that is most of the time.
    The caller guarantees the types: the entry does not check them.
    """
    if not isinstance(loop, Dispatcher):
        return loop  # interpreted
    return cast("Callable[P, R]", _entry_point(loop, _Examples(examples)))


class _Examples:
    """Arguments of a loop, equal to others of the same types: a look-up takes 5 us, where Numba takes 300."""

    __slots__ = ("kinds", "values")

    def __init__(self, values: tuple[object, ...]) -> None:
        self.values = values
        self.kinds = tuple(map(_kind_of, values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Examples) and self.kinds == other.kinds

    def __hash__(self) -> int:
        return hash(self.kinds)


def _kind_of(value: object) -> Hashable:
    """Return a key that is equal only for values to which Numba gives one type."""
    kind = cast("Hashable", type(value))
    if isinstance(value, tuple):
        kind = (kind, *map(_kind_of, value))
    elif isinstance(value, np.ndarray):
        kind = (value.dtype, value.ndim, value.flags.num)
    return kind


@cache
def _entry_point(loop: Hashable, examples: _Examples) -> object:
    signature = tuple(map(cast("Any", numba).typeof, examples.values))
    examples.values = ()  # the examples are kept as a key, and must not keep the arrays of a space alive
    return cast("Loop", loop).compile(signature)


@inlined
def unsigned(value: int) -> int:
    """Mark an index as not negative, so that compiled code does not check whether it counts from the end."""
    return np.uintp(value)  # type: ignore[return-value]  # Numba compiles no cast
