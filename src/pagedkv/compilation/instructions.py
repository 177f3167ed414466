"""Two processor instructions that Python lacks: prefetching, and comparing 16 integers at once.

Prefetching is a hint without an effect on a program's results. A walk along blocks that are scattered in memory waits
for each in turn, 0.15 us from main memory; with hints given early enough, the processor fetches many at once. The
comparison is emitted as one comparison of vectors, since Numba lets LLVM vectorise only loops longer than a block's 16
tokens.

Interpreted code does not prefetch, and compares with NumPy.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeGuard, cast

# As in sha256.py: llvmlite ships no types, and its values stay inside the emit functions below.
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic, is_jitted

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint32Array

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
