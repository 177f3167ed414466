"""Buckets: steps and admissions summed over equal spans of time, for plots."""

from typing import Any, Final

import numpy as np

from pagedkv.contract.arrays import Float64Array
from pagedkv.server.inspector.history import ADMISSION_FIELDS, STEP_FIELDS

__all__ = ["MOST_BUCKETS", "as_buckets", "width_for"]

MOST_BUCKETS: Final = 600

SUMMED: Final = (
    *("decoded", "prefilled", "hit", "admitted", "swapped_out", "recomputed", "finished"),
    *("schedule_s", "forward_s", "sample_s", "finish_s"),
)
LASTING: Final = ("running", "waiting", "swapped", "used_blocks")
"""Columns whose last value in the bucket counts."""


def width_for(seconds: float, unit_s: float = 1) -> float:
    """Return the width of a bucket in seconds, whole units of time, such that there are at most MOST_BUCKETS."""
    return unit_s * max(1, -int(-seconds // (unit_s * MOST_BUCKETS)))


def as_buckets(steps: Float64Array, admissions: Float64Array, width_s: float) -> dict[str, Any]:
    """Sum steps and admissions over buckets; empty buckets are left out. O(steps + admissions).

    Args:
        steps: float64 ``[n, len(STEP_FIELDS)]``, oldest first.
        admissions: float64 ``[m, len(ADMISSION_FIELDS)]``, oldest first.
        width_s: seconds of a bucket; buckets begin at multiples of it.

    Returns:
        ``start_s`` and ``steps`` of each bucket, and the columns of SUMMED and LASTING; ``misses``: triples of a
        bucket's start, the cause's number and the missed tokens.
    """
    begins = (steps[:, 0] // width_s).astype(np.int64)
    starts, firsts, counts = np.unique(begins, return_index=True, return_counts=True)
    lasts = firsts + counts - 1
    columns: dict[str, Any] = {"width_s": width_s, "start_s": (starts * width_s).tolist(), "steps": counts.tolist()}
    for name in SUMMED:
        column = steps[:, STEP_FIELDS.index(name)]
        columns[name] = np.round(np.add.reduceat(column, firsts), 6).tolist() if len(firsts) else []
    for name in LASTING:
        columns[name] = steps[lasts, STEP_FIELDS.index(name)].tolist()
    columns["misses"] = _misses(admissions, width_s)
    return columns


def _misses(admissions: Float64Array, width_s: float) -> list[list[float]]:
    missed = admissions[:, ADMISSION_FIELDS.index("missed")]
    keys = np.stack([admissions[:, 0] // width_s, admissions[:, ADMISSION_FIELDS.index("cause")]], axis=1)
    pairs, places = np.unique(keys, axis=0, return_inverse=True)
    sums = np.bincount(places.ravel(), missed, len(pairs))
    return [[int(begin) * width_s, int(cause), int(tokens)] for (begin, cause), tokens in zip(pairs, sums, strict=True)]
