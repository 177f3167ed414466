"""Instructions without a word in Python: the comparison against NumPy's, and a hint without a visible effect."""

import numpy as np
import pytest
from numba.core.errors import TypingError
from numba.extending import is_jitted

from pagedkv.compilation.compiled import PIECE, compiled, prefetch, same_piece
from pagedkv.contract.arrays import Int32Array

TABLE = np.arange(5 * 40, dtype=np.int32).reshape(5, 40)


@compiled
def compare(table: Int32Array, row: int, column: int, flat: Int32Array, start: int) -> bool:
    return same_piece(table, row, column, flat, start)


@compiled
def fetch(array: Int32Array, row: int, column: int) -> None:
    prefetch(array, row, column)


@pytest.mark.interpreted
@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 0), (2, 7), (4, 24)])
@pytest.mark.parametrize("start", [0, 1, 9])
def test_sixteen_integers_are_compared_and_no_other(row: int, column: int, start: int) -> None:
    """Every one of them counts, in every bit; what lies around does not."""
    flat = np.full(start + PIECE + 3, -7, np.int32)
    flat[start : start + PIECE] = TABLE[row, column : column + PIECE]
    assert compare(TABLE, row, column, flat, start) is True
    for place in range(PIECE):
        for bit in (0, 15, 31):
            flat[start + place] ^= np.int32(-(2**31) if bit == 31 else 1 << bit)
            assert compare(TABLE, row, column, flat, start) is False
            flat[start + place] ^= np.int32(-(2**31) if bit == 31 else 1 << bit)
    assert compare(TABLE, row, column, flat, start) is True


@pytest.mark.interpreted
def test_fetching_changes_nothing() -> None:
    table = TABLE.copy()
    for row in range(5):
        for column in range(40):
            fetch(table, row, column)
    assert (table == TABLE).all()


@pytest.mark.skipif(not is_jitted(compare), reason="nothing is compiled")
def test_arrays_that_would_be_misread_do_not_compile() -> None:
    flat = np.zeros(PIECE, np.int32)
    with pytest.raises(TypingError, match="contiguous int32 arrays"):
        compare(TABLE.astype(np.int64), 0, 0, flat, 0)
    with pytest.raises(TypingError, match="contiguous int32 arrays"):
        compare(TABLE[:, ::2], 0, 0, flat, 0)
    with pytest.raises(TypingError, match="contiguous int32 array of two dimensions"):
        fetch(flat, 0, 0)
