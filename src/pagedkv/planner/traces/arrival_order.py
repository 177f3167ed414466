"""The one rule about time that all formats share: arrivals never fall.

Equal ones are fine, and count in file order. A trace out of order would make a replay send requests into the past;
sorting takes more than one row in memory, so it needs an option.
"""

import shlex

from pagedkv.planner.traces.lines import Line

__all__ = ["ArrivalOrder"]


class ArrivalOrder:
    """Follows the arrivals of one clock."""

    def __init__(self) -> None:
        self._latest_s = 0.0
        self._latest_line = 0

    def follow(self, line: Line, arrival_s: float, where: str = "") -> None:
        """Take the next arrival, in seconds.

        Args:
            line: where it was read.
            where: which request of the line it belongs to, if there are several.

        Raises:
            TraceError: it is earlier than the one before.
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
