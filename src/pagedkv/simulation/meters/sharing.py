"""Blocks that samples and beams of one request share, instead of copying them."""

from typing import NamedTuple

import numpy as np

from pagedkv.blocks import NULL_BLOCK
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Int64Array

__all__ = ["Branches", "SharingMeter"]


class Branches(NamedTuple):
    """The sequences of requests with several sequences.

    Args:
        table: int32 ``[max_sequences, width]``, the block table.
        rows: int32 ``[sequences]``, grouped by request.
        num_blocks: int32 ``[sequences]``, table entries of each.
        num_rows: int32 ``[requests]``, sequences of each request.
    """

    table: Int32Array
    rows: Int32Array
    num_blocks: Int32Array
    num_rows: Int32Array


class SharingMeter:
    """The mean saving over the decode steps that serve a request of several sequences.

    Args:
        num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._marks = np.zeros(num_blocks, np.int64)
        self._last_mark = 0
        self._num_steps = 0
        self._sum = 0.0

    def measure(self, branches: Branches) -> None:
        """Measure one decode step. O(table entries)."""
        num_distinct = _count_distinct(branches, self._marks, self._last_mark)
        self._last_mark += len(branches.num_rows)
        self._num_steps += 1
        self._sum += 1 - num_distinct / int(branches.num_blocks.sum())

    def as_dict(self) -> dict[str, object]:
        """Return the mean for JSON; None if no request had several sequences."""
        mean = self._sum / self._num_steps if self._num_steps else None
        return {"mean_saving": mean, "num_decode_steps": self._num_steps}


@compiled
def _count_distinct(branches: Branches, marks: Int64Array, last_mark: int) -> int:
    """Sum the numbers of distinct blocks of each request. Null blocks count once for each entry."""
    num_distinct = 0
    place = 0
    for request in range(len(branches.num_rows)):
        mark = last_mark + 1 + request
        for _ in range(branches.num_rows[request]):
            for index in range(branches.num_blocks[place]):
                block = branches.table[branches.rows[place], index]
                if block == NULL_BLOCK or marks[block] != mark:
                    num_distinct += 1
                    marks[block] = mark
            place += 1
    return num_distinct
