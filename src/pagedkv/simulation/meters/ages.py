"""Counts by age, in intervals of the series 1, 2, 5."""

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["UPPER_EDGES_S", "AgeHistogram"]

UPPER_EDGES_S: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""Upper ends, inclusive, of all intervals but the last, which is open. The first has the age 0 alone."""


class AgeHistogram:
    """Counts by age in seconds, 0 or more."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(UPPER_EDGES_S) + 1, np.int64)

    def add(self, ages_s: npt.NDArray[np.float64]) -> None:
        """Count some ages."""
        places = np.searchsorted(UPPER_EDGES_S, ages_s, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))

    def as_dict(self) -> dict[str, object]:
        """Return the counts for JSON; None is the end of the last interval."""
        return {"upper_edges_s": [*UPPER_EDGES_S, None], "num_blocks": self._counts.tolist()}
