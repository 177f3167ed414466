"""Block ids of a prompt: their run-length coding, and the number of tokens that each id covers.

Ids come as runs ``[first, count]``, which mean ``first, first + 1, ... first + count - 1``. A trace of full blocks that
does not state the block size b still determines it: a row of ``length`` tokens has ``length // b`` ids, and b is a
power of two. For k >= 1 ids, ``length // b == k`` holds for b in ``(length / (k + 1), length / k]``. This interval
spans at most a factor of two, so it contains at most one power of two: the first row with ids determines b, and all
other rows must agree.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.errors import TraceError
from pagedkv.planner.traces.lines import Line

__all__ = ["MAX_BLOCK_ID", "InferredBlockSize", "count_ids", "expand_runs", "run_lengths", "wrong_number_of_ids"]

MAX_BLOCK_ID: Final = 2**63 - 1


def expand_runs(runs: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Expand run-length coded ids.

    Args:
        runs: pairs ``(first, count)`` with ``first >= 0`` and ``count >= 1``.

    Returns:
        int64 ``[sum of counts]``.

    >>> expand_runs([(7, 3), (2, 1)]).tolist()
    [7, 8, 9, 2]
    """
    firsts, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(counts.sum(), dtype=np.int64)


def run_lengths(block_ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Code ids as the fewest runs; the inverse of :func:`expand_runs`. O(ids).

    Args:
        block_ids: int64 ``[n]``, none negative.

    >>> run_lengths(np.array([7, 8, 9, 2]))
    [(7, 3), (2, 1)]
    """
    if not len(block_ids):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(block_ids) != 1) + 1))
    counts = np.diff(starts, append=len(block_ids))
    return list(zip(block_ids[starts].tolist(), counts.tolist(), strict=True))


def count_ids(line: Line, runs: Sequence[tuple[int, int]], offset: int = 0, key: str = "hash_runs") -> int:
    """Check the runs of a row and count their ids without expanding them, since a count may be absurd.

    Args:
        line: the row.
        runs: pairs ``(first, count)``.
        offset: added to each id later.
        key: name of the runs in the format.

    Raises:
        TraceError: a run is empty, an id is negative, or one exceeds ``MAX_BLOCK_ID`` after ``offset`` is added.
    """
    for first, count in runs:
        if first < 0 or count < 1 or offset + first + count - 1 > MAX_BLOCK_ID:
            raise line.fault(f"{key} holds [{first}, {count}]", "A run is [first id >= 0, count >= 1], ids below 2**63")
    return sum(count for _, count in runs)


def wrong_number_of_ids(line: Line, input_length: int, num_ids: int, block_size: int, where: str = "") -> TraceError:
    """Build the error for a row whose ids do not fit its length."""
    return line.fault(
        f"{where}{num_ids} block ids do not fit a prompt of {input_length} tokens at {block_size} tokens a block",
        "Repair the row, or name the trace's block size (`TraceReader.block_size`)",
    )


class InferredBlockSize:
    """Number of tokens per id in a trace of full blocks: given, or inferred from the first row with ids.

    Args:
        given: the block size that the user states; None: infer it.
    """

    def __init__(self, given: int | None) -> None:
        self._block_size = given or 0
        self._longest_without_ids: tuple[int, Line] | None = None

    def learn(self, line: Line, input_length: int, num_ids: int) -> int:
        """Infer the block size from one row, or check it against the row.

        Returns:
            The block size, or 0 while no row has had ids.

        Raises:
            TraceError: this row, or an earlier one without ids, contradicts the block size.
        """
        if self._block_size == 0 and num_ids == 0:
            self._remember_without_ids(line, input_length)
            return 0
        if self._block_size == 0:
            self._block_size = _power_of_two_that_fits(line, input_length, num_ids)
            self._check_earlier_rows()
        if input_length // self._block_size != num_ids:
            raise wrong_number_of_ids(line, input_length, num_ids, self._block_size)
        return self._block_size

    def _remember_without_ids(self, line: Line, input_length: int) -> None:
        if self._longest_without_ids is None or input_length > self._longest_without_ids[0]:
            self._longest_without_ids = (input_length, line)

    def _check_earlier_rows(self) -> None:
        if self._longest_without_ids is None:
            return
        input_length, line = self._longest_without_ids
        if input_length >= self._block_size:
            raise wrong_number_of_ids(line, input_length, 0, self._block_size)


def _power_of_two_that_fits(line: Line, input_length: int, num_ids: int) -> int:
    """Find the block size: the largest power of two up to ``input_length / num_ids``, if it fits."""
    tokens_per_id = max(1, input_length // num_ids)
    block_size = 1 << (tokens_per_id.bit_length() - 1)
    if input_length // block_size != num_ids:
        raise line.fault(
            f"{num_ids} block ids do not fit a prompt of {input_length} tokens at any power of two",
            "Repair the row, or name the trace's block size (`TraceReader.block_size`)",
        )
    return block_size
