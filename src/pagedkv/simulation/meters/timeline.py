"""Levels and counts over time, in a bounded number of intervals for any duration.

At first each step is an interval. When there are too many, neighbours are merged in pairs; from then on the shortest
interval is their mean. Levels are averaged over the seconds of an interval; counts add up.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_INTERVALS", "Timeline"]

MOST_INTERVALS: Final = 512
SHORTEST_INTERVAL_S: Final = 1e-9


class Timeline:
    """Levels and counts over time.

    Args:
        levels: names of quantities that have a value at any time.
        counts: names of events that are counted.
    """

    def __init__(self, levels: Sequence[str], counts: Sequence[str]) -> None:
        self._levels = list(levels)
        self._counts = list(counts)
        self._rows = np.zeros((2 * MOST_INTERVALS, 1 + len(levels) + len(counts)))
        self._num_rows = 0
        self._interval_s = 0.0

    def hold(self, duration_s: float, levels: Sequence[float], counts: Sequence[float]) -> None:
        """Add a duration with these levels, and counts."""
        if self._num_rows == 0 or self._is_last_complete():
            self._open_interval()
        row = self._rows[self._num_rows - 1]
        row[0] += duration_s
        row[1 : 1 + len(levels)] += np.multiply(levels, duration_s)
        row[1 + len(levels) :] += counts

    def _is_last_complete(self) -> bool:
        """Whether the last interval is long enough; steps without duration belong to the next interval."""
        return bool(self._rows[self._num_rows - 1, 0] >= max(self._interval_s, SHORTEST_INTERVAL_S))

    def _open_interval(self) -> None:
        if self._num_rows == len(self._rows):
            self._rows[:MOST_INTERVALS] = self._rows[0::2] + self._rows[1::2]
            self._rows[MOST_INTERVALS:] = 0
            self._num_rows = MOST_INTERVALS
            self._interval_s = float(self._rows[:MOST_INTERVALS, 0].mean())
        self._num_rows += 1

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the columns: ``duration_s``, means of levels, sums of counts; float64 ``[intervals]`` each.

        Without any duration there is no interval.
        """
        rows = self._joined()
        if len(rows) > 1 and rows[-1, 0] == 0:  # steps without duration at the very end belong to the interval before
            rows = np.concatenate((rows[:-2], rows[-2:].sum(axis=0, keepdims=True)))
        rows = rows[rows[:, 0] > 0]
        num_levels = len(self._levels)
        means = rows[:, 1 : 1 + num_levels] / rows[:, :1]
        sums = rows[:, 1 + num_levels :]
        return {
            "duration_s": rows[:, 0],
            **dict(zip(self._levels, means.T, strict=True)),
            **dict(zip(self._counts, sums.T, strict=True)),
        }

    def _joined(self) -> npt.NDArray[np.float64]:
        rows = self._rows[: self._num_rows]
        if len(rows) <= MOST_INTERVALS:
            return rows
        rows = self._rows[: len(rows) + len(rows) % 2]
        return rows[0::2] + rows[1::2]
