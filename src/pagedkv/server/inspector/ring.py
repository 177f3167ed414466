"""Ring: rows of numbers in the order of writing; new rows overwrite the oldest."""

from collections.abc import Sequence
from typing import final

import numpy as np

from pagedkv.contract.arrays import Float64Array

__all__ = ["Ring"]


@final
class Ring:
    """Rows of float64, which hold counts exactly up to 2**53.

    Args:
        num_rows: rows that are kept.
        num_columns: numbers of a row. If rows are looked up by time, the first number is the time and never decreases.

    Attributes:
        num_written: rows written so far, including overwritten ones.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._rows: Float64Array = np.zeros((num_rows, num_columns))
        self.num_written = 0

    def __len__(self) -> int:
        """Number of rows that are kept now."""
        return min(self.num_written, len(self._rows))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, written or not."""
        return self._rows.nbytes

    def append(self, row: Sequence[float] | Float64Array) -> int:
        """Write a row; return its number, for :meth:`row`. O(columns)."""
        number = self.num_written
        self._rows[number % len(self._rows)] = row
        self.num_written = number + 1
        return number

    def row(self, number: int) -> Float64Array | None:
        """Return a writable view of a row; None where a later row has overwritten it. O(1)."""
        return self._rows[number % len(self._rows)] if self.num_written - number <= len(self._rows) else None

    def last(self, num_rows: int) -> Float64Array:
        """Copy the last rows, oldest first; fewer where fewer are kept. O(rows copied)."""
        first = self.num_written - min(num_rows, len(self))
        return self._rows[np.arange(first, self.num_written) % len(self._rows)]

    def between(self, from_s: float, to_s: float) -> Float64Array:
        """Copy the rows with times in ``[from_s, to_s)``, oldest first. O(rows copied)."""
        turn = self.num_written % len(self._rows)
        older = self._rows[turn:] if self.num_written > len(self._rows) else self._rows[:0]
        newer = self._rows[:turn] if self.num_written != len(self._rows) else self._rows
        parts = [part[slice(*np.searchsorted(part[:, 0], (from_s, to_s)).tolist())] for part in (older, newer)]
        return np.concatenate(parts)
