"""What compiled loops are written with: decorators, a choice among loops, and instructions that Python lacks.

The loops are plain Python over NumPy arrays. With ``NUMBA_DISABLE_JIT=1`` they run interpreted, can be
stepped through, and must give the same results (``make test`` and ``make test-plain``).

A loop can stand for several others: the class of its first argument selects one of them at compile time, so machine
code contains the selected loop and none of the others; interpreted code selects it at each call. This serves pools
(:mod:`pagedkv.blocks.record`): the loops of features are left out for a class without any, and the class binds the
loops of its eviction policy. A policy is imported by nobody who calls it. Therefore the key of machine code also covers
the sources of all loops that are bound to the classes of its arguments (:mod:`~pagedkv.compilation.loop_cache`).

The instructions prefetch, and compare 16 integers at once. Prefetching is a hint without an effect on a program's
results. A walk along blocks that are scattered in memory waits for each in turn, 0.15 us from main memory; with hints
given early enough, the processor fetches many at once. The comparison is emitted as one comparison of vectors, since
Numba lets LLVM vectorise only loops longer than a block's 16 tokens. Interpreted code does not prefetch, and compares
with NumPy.
"""

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeGuard, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError
from numba.extending import intrinsic, is_jitted

from pagedkv.compilation.loop import Loop
from pagedkv.compilation.loop_cache import POLICY, LoopCache
from pagedkv.contract.arrays import Int32Array, Uint32Array

P = ParamSpec("P")
R = TypeVar("R")

FEATURES: Final = "has_features"
"""The attribute that is true for a class of pools with features."""
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


Opaque: TypeAlias = Any
"""Objects that Numba passes in and takes back: types of arguments, templates of calls."""


def chosen(loop_of: Callable[[type], Callable[P, R]]) -> Callable[P, R]:
    """Make a loop that stands for the one that a function returns for the class of the first argument."""
    return _Choice(loop_of)


@inlined
def nothing(*_arguments: object) -> bool:
    """Do nothing, and return False: what is chosen where a class of pools has no such loop."""
    return False


def featured(loop: Callable[P, R]) -> Callable[P, R]:
    """Decorate a loop of an optional feature, which takes the pool first: without features it does nothing.

    What it returns is then False, the answer to a question; else it is of no use.
    The class of the pool's arrays decides that (``has_features``) when a caller is compiled, so that the machine code
    of pools without features contains none of it, and takes no time to compile it (0004-compiled-loops.md).
    """
    return chosen(lambda kind: loop if getattr(kind, FEATURES, False) else cast("Callable[P, R]", nothing))


def chosen_by_policy(name: str, default: Callable[P, R]) -> Callable[P, R]:
    """Make a loop that stands for ``policy.<name>`` of the first argument's class; the default if it has no policy."""
    return chosen(lambda kind: getattr(getattr(kind, POLICY, None), name, default))


class _Choice(Generic[P, R]):
    """A stand-in for several loops, with the interface by which Numba uses the dispatcher of one function."""

    is_compiling = False  # it never compiles itself

    def __init__(self, loop_of: Callable[[type], Callable[P, R]]) -> None:
        self._loop_of = loop_of
        self._type = cast("Opaque", types.Dispatcher)(self)

    def __call__(self, *args: P.args, **kws: P.kwargs) -> R:
        return self._loop_of(type(args[0]))(*args, **kws)

    @property
    def _numba_type_(self) -> Opaque:
        return self._type

    def get_call_template(self, args: Opaque, kws: Opaque) -> Opaque:
        """Return the template of a call with arguments of these types."""
        return self._meant(args).get_call_template(args, kws)

    def get_overload(self, args: Opaque) -> Opaque:
        """Return the code of the selected loop, as :meth:`Loop.get_overload` does."""
        return self._meant(args).get_overload(args)

    def _meant(self, args: Opaque) -> Loop:
        first = args[0]
        if isinstance(first, types.StarArgTuple | types.StarArgUniTuple):  # of a loop that takes any arguments
            first = first[0]
        loop = self._loop_of(first.instance_class)
        assert not isinstance(loop, FunctionType), "a loop that is compiled calls one that is not"
        return cast("Loop", loop)


CodeContext: TypeAlias = Any  # Numba's class; its methods are not annotated

PIECE: Final = 16
"""Integers that :func:`same_piece` compares: the usual number of tokens of a block, and one cache line."""

READ: Final = 0
INTO_SECOND_CACHE: Final = 2  # the first accepts few fetches at once: 282 us instead of 169 for 8,192 blocks
DATA: Final = 1
INT32: Final = ir.IntType(32)
PIECE_OF_INT32: Final = ir.VectorType(INT32, PIECE)


def _is_contiguous(array: types.Type, number: types.Type, num_dimensions: int) -> "TypeGuard[types.Array[types.Type]]":
    return (
        isinstance(array, types.Array)
        and array.dtype == number
        and array.ndim == num_dimensions
        and array.layout == "C"
    )


def _is_int32(array: types.Type, num_dimensions: int) -> "TypeGuard[types.Array[types.Type]]":
    return _is_contiguous(array, types.int32, num_dimensions)


def _address(
    context: CodeContext, builder: ir.IRBuilder, array_type: CodeContext, array: ir.Value, *indices: ir.Value
) -> ir.Value:
    """Emit the address of one element of a contiguous array; indices are intp, and not negative."""
    fields = context.make_array(array_type)(context, builder, array)
    place = indices[0]
    for dimension, index in enumerate(indices[1:], start=1):
        place = builder.add(builder.mul(place, builder.extract_value(fields.shape, dimension)), index)
    return builder.gep(fields.data, [place])


def _as_indices(
    context: CodeContext, builder: ir.IRBuilder, signature: CodeContext, arguments: list[ir.Value], places: range
) -> list[ir.Value]:
    return [context.cast(builder, arguments[place], signature.args[place], types.intp) for place in places]


def _emit_prefetch(
    context: CodeContext, builder: ir.IRBuilder, signature: CodeContext, arguments: list[ir.Value]
) -> ir.Value:
    row, column = _as_indices(context, builder, signature, arguments, range(1, 3))
    element = _address(context, builder, signature.args[0], arguments[0], row, column)
    address = builder.bitcast(element, ir.IntType(8).as_pointer())
    how = [ir.Constant(INT32, value) for value in (READ, INTO_SECOND_CACHE, DATA)]
    hint_type = ir.FunctionType(ir.VoidType(), [address.type, INT32, INT32, INT32])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch", [address.type], hint_type), [address, *how])
    return context.get_dummy_value()


def _typed_prefetch(
    _context: object, array: types.Type, row: types.Type, column: types.Type
) -> tuple[object, Callable[..., ir.Value]]:
    if not (_is_contiguous(array, types.int32, 2) or _is_contiguous(array, types.uint32, 2)):
        raise TypingError(f"rows of a contiguous int32 array of two dimensions are fetched, not of {array}")
    return types.void(array, row, column), _emit_prefetch


def _emit_comparison(
    context: CodeContext, builder: ir.IRBuilder, signature: CodeContext, arguments: list[ir.Value]
) -> ir.Value:
    row, column = _as_indices(context, builder, signature, arguments, range(1, 3))
    (start,) = _as_indices(context, builder, signature, arguments, range(4, 5))
    left = _address(context, builder, signature.args[0], arguments[0], row, column)
    right = _address(context, builder, signature.args[3], arguments[3], start)
    pieces = [builder.load(builder.bitcast(address, PIECE_OF_INT32.as_pointer()), align=4) for address in (left, right)]
    differences = builder.bitcast(builder.icmp_signed("!=", *pieces), ir.IntType(PIECE))
    return builder.icmp_signed("==", differences, ir.Constant(ir.IntType(PIECE), 0))


def _typed_comparison(
    _context: object, table: types.Type, row: types.Type, column: types.Type, flat: types.Type, start: types.Type
) -> tuple[object, Callable[..., ir.Value]]:
    if not (_is_int32(table, 2) and _is_int32(flat, 1)):
        raise TypingError(f"contiguous int32 arrays of two and one dimensions are compared, not {table} and {flat}")
    return types.boolean(table, row, column, flat, start), _emit_comparison


@compiled
def _fetch_nothing(array: Int32Array | Uint32Array, row: int, column: int) -> None:
    pass


def _same_by_numpy(table: Int32Array, row: int, column: int, flat: Int32Array, start: int) -> bool:
    return bool((table[row, column : column + PIECE] == flat[start : start + PIECE]).all())


Fetch: TypeAlias = Callable[[Int32Array | Uint32Array, int, int], None]
Compare: TypeAlias = Callable[[Int32Array, int, int, Int32Array, int], bool]

_fetch: Final = cast("Fetch", intrinsic(_typed_prefetch))
_same_by_vectors: Final = cast("Compare", intrinsic(_typed_comparison))

prefetch: Final[Fetch] = _fetch if is_jitted(_fetch_nothing) else _fetch_nothing
"""Prefetch ``array[row, column]`` into the processor's caches, if it is not there.

``array`` is contiguous int32 or uint32 ``[rows, columns]``. Any element may be given, since nothing is read.
"""

same_piece: Final[Compare] = _same_by_vectors if is_jitted(_fetch_nothing) else _same_by_numpy
"""Return whether ``table[row, column : column + PIECE]`` equals ``flat[start : start + PIECE]``.

Both are contiguous int32, of two dimensions and of one; compiled code does not check bounds.
"""
