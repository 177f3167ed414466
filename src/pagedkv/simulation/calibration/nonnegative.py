"""Least squares without negative coefficients: the active set method of Lawson and Hanson (1974), chapter 23.

Costs are never negative. If the plain solution gives a column a negative coefficient, the column explains no more than
the others do, and is left out.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Float64Array

__all__ = ["nonnegative_least_squares"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]

TOLERANCE: Final = 1e-10
ROUNDS_A_COLUMN: Final = 10


def nonnegative_least_squares(columns: Float64Array, target: Float64Array) -> Float64Array:
    """Find coefficients, none negative, that minimise the squared error of ``columns @ coefficients`` to ``target``.

    Of equivalent columns, the first one gets the coefficient. O(rows * columns^2) for each used column.

    Args:
        columns: float64 ``[rows, columns]``.
        target: float64 ``[rows]``.

    Returns:
        float64 ``[columns]``.

    >>> nonnegative_least_squares(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([2.0, 1.0])).round(6).tolist()
    [1.5, 0.0]
    """
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    scaled = columns / norms
    num_columns = columns.shape[1]
    used = np.zeros(num_columns, bool)
    found = np.zeros(num_columns)
    least = TOLERANCE * max(float(np.linalg.norm(target)), 1e-300)
    for _ in range(ROUNDS_A_COLUMN * num_columns):
        gains = scaled.T @ (target - scaled @ found)
        gains[used] = 0.0
        if gains.max(initial=0.0) <= least:
            break
        used[int(gains.argmax())] = True
        found = _solved(scaled, target, used, found)
    coefficients: Float64Array = found / norms
    return coefficients


def _solved(scaled: Float64Array, target: Float64Array, used: BoolArray, found: Float64Array) -> Float64Array:
    """Solve for the used columns, leaving out those whose coefficient would be negative; changes ``used``."""
    while used.any():
        plain = np.zeros_like(found)
        plain[used] = np.linalg.lstsq(scaled[:, used], target, rcond=None)[0]
        negative = used & (plain <= 0)
        if not negative.any():
            return plain
        falls = found[negative] - plain[negative]
        shares = np.divide(found[negative], falls, out=np.zeros_like(falls), where=falls > 0)
        found = found + shares.min() * (plain - found)  # until the first coefficient becomes 0
        used &= found > TOLERANCE * np.abs(found).max(initial=0.0)
        found = np.where(used, found, 0.0)
    return np.zeros_like(found)
