"""Outputs of the requests under way, concatenated in one array, to gather tokens of many requests at once."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array, Int64Array

__all__ = ["OutputStore"]

LEAST_ROOM: Final = 4096


class OutputStore:
    """Outputs by numbers of requests. It takes at most twice the memory of its outputs at their largest.

    >>> store = OutputStore()
    >>> store.put(7, np.array([1, 2, 3], np.int32))
    >>> store.put(8, np.array([4, 5, 6], np.int32))
    >>> store.of(8, 1, 2).tolist(), store.together([8, 7], np.array([0, 1]), 2).tolist()
    ([5, 6], [[4, 2], [5, 3]])
    """

    def __init__(self) -> None:
        self._tokens = np.empty(LEAST_ROOM, np.int32)
        self._num_used = 0
        self._spans: dict[int, tuple[int, int]] = {}

    def put(self, number: int, token_ids: Int32Array) -> None:
        """Store an output, in place of an earlier one of this number. O(tokens), and now and then O(all tokens)."""
        self.drop(number)
        if self._num_used + len(token_ids) > len(self._tokens):
            self._move(len(token_ids))
        start, stop = self._num_used, self._num_used + len(token_ids)
        self._tokens[start:stop] = token_ids
        self._spans[number] = start, stop
        self._num_used = stop

    def drop(self, number: int) -> None:
        """Drop an output, if there is one."""
        self._spans.pop(number, None)

    def of(self, number: int, first: int, count: int) -> Int32Array:
        """Return some tokens of an output, fewer where it ends: int32 ``[count]``. Raises KeyError."""
        start, stop = self._spans[number]
        return self._tokens[start + first : min(start + first + count, stop)].copy()

    def together(self, numbers: Sequence[int], firsts: Int64Array, count: int) -> Int32Array:
        """Return equally many tokens of several outputs: int32 ``[count, outputs]``. Raises KeyError.

        Args:
            numbers: numbers of the outputs.
            firsts: int64 ``[outputs]``, place of the first token in each.
            count: tokens of each; no output may end earlier.
        """
        spans = self._spans
        places = np.array([spans[number][0] for number in numbers], np.int64) + firsts
        tokens: Int32Array = self._tokens[places + np.arange(count)[:, np.newaxis]]
        return tokens

    def _move(self, num_more: int) -> None:
        """Move the outputs into a new array of twice their size."""
        num_held = sum(stop - start for start, stop in self._spans.values())
        moved = np.empty(max(LEAST_ROOM, 2 * (num_held + num_more)), np.int32)
        self._num_used = 0
        for number, (start, stop) in self._spans.items():
            end = self._num_used + stop - start
            moved[self._num_used : end] = self._tokens[start:stop]
            self._spans[number] = self._num_used, end
            self._num_used = end
        self._tokens = moved
