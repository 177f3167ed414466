"""Latencies of requests: in the queue, to their first token, and in all."""

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

__all__ = ["LatencyMeter"]

PERCENTILES: Final = (50, 90, 99)


class LatencyMeter:
    """Three times of each request, in seconds of the virtual clock."""

    def __init__(self) -> None:
        self.queueing_s = array("d")
        self.first_token_s = array("d")
        self.request_s = array("d")

    def as_dict(self) -> dict[str, object]:
        """Return means, percentiles and largest values for JSON."""
        return {
            "queueing_s": _summary(self.queueing_s),
            "first_token_s": _summary(self.first_token_s),
            "request_s": _summary(self.request_s),
        }


def _summary(times_s: Sequence[float]) -> dict[str, float | None]:
    names = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    if not times_s:
        return dict.fromkeys(names)
    values = [float(np.mean(times_s)), *np.percentile(times_s, PERCENTILES).tolist(), max(times_s)]
    return dict(zip(names, values, strict=True))
