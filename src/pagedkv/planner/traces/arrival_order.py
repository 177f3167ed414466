"""The rule about time that all formats share: arrivals never decrease.

Equal arrivals are allowed, and keep file order. An unsorted trace would send requests of a replay into the past.
Sorting holds more than one row in memory, so it needs an option.
"""

import shlex

from pagedkv.planner.traces.lines import Line

__all__ = ["ArrivalOrder"]


class ArrivalOrder:
    """Checks that the arrivals of one clock never decrease."""

    def __init__(self) -> None:
        self._latest_s = 0.0
        self._latest_line = 0

    def follow(self, line: Line, arrival_s: float, where: str = "") -> None:
        """Check the next arrival, in seconds.

        Args:
            line: the line of the arrival.
            where: the request within the line, if the line has several.

        Raises:
            TraceError: it is earlier than the previous arrival.
        """
        if arrival_s < self._latest_s:
            before = "the one before" if self._latest_line == line.number else f"line {self._latest_line}"
            sort = f"`sorted_by_arrival({shlex.quote(line.path)})`"
            raise line.fault(
                f"{where}arrives at {arrival_s} s, after {before} at {self._latest_s} s",
                f"Put the requests in order of arrival: {sort}",
            )
        self._latest_s = arrival_s
        self._latest_line = line.number
