"""TokenGaps: a histogram of the time between tokens, filled once a step instead of once a token."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import final

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

__all__ = ["TokenGaps"]


@final
class TokenGaps(Collector):
    """Counts the gap between two steps once for each sequence that the later step decoded.

    A sequence gets at most one update a step, so the gap between steps is the gap between its tokens. The waiting time
    of a preempted sequence is not included.

    Args:
        name: name of the metric.
        bounds: upper bounds of the buckets, in seconds, rising.
        labels: names and values of the labels.
    """

    def __init__(self, name: str, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
        self._name = name
        self._bounds = (*bounds, inf)
        self._labels = dict(labels)
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        self._last_s: float | None = None

    def note(self, now_s: float, num_decoded: int) -> None:
        """Count a step that has ended.

        Args:
            now_s: time of its end.
            num_decoded: sequences that it decoded.
        """
        if self._last_s is not None and num_decoded:
            gap_s = now_s - self._last_s
            self._counts[bisect_left(self._bounds, gap_s)] += num_decoded
            self._sum_s += gap_s * num_decoded
        self._last_s = now_s

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram, as prometheus_client expects it."""
        family = HistogramMetricFamily(
            self._name, "Seconds between two tokens of an answer.", labels=list(self._labels)
        )
        counts = accumulate(tuple(self._counts))
        names = ["+Inf" if bound == inf else str(bound) for bound in self._bounds]
        buckets = [(name, float(count)) for name, count in zip(names, counts, strict=True)]
        family.add_metric(list(self._labels.values()), buckets, self._sum_s)
        yield family
