"""Which process compiles which requests: runs of adjacent ones, since these share pieces.

A process keeps the pieces that it has compiled, and loops of one rehearsal have most pieces in common. Requests that
are dealt out one by one would make each process compile nearly all pieces.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import final

from pagedkv.compilation.requests import Request


@final
class Runs:
    """The requests that wait, as one run for each process. May be used by several threads.

    Args:
        requests: all requests, in the order of their rehearsals.
        num_processes: the number of runs.
    """

    def __init__(self, requests: Sequence[Request], num_processes: int) -> None:
        bounds = [len(requests) * process // num_processes for process in range(num_processes + 1)]
        self._runs = [deque(requests[bounds[i] : bounds[i + 1]]) for i in range(num_processes)]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def take(self, process: int) -> Request | None:
        """Take the next request of a process's run, or else the last of the longest run; None if no request waits."""
        with self._lock:
            if self._runs[process]:
                return self._runs[process].popleft()
            longest = max(self._runs, key=len)
            return longest.pop() if longest else None

    def clear(self) -> None:
        """Drop all requests, so that processes end after the loops that they are compiling."""
        with self._lock:
            for run in self._runs:
                run.clear()
