"""Which process compiles which entries: runs of adjacent ones, since these share pieces.

A process keeps the pieces that it has compiled, and loops of one part have most pieces in common. Entries that
are dealt out one by one would make each process compile nearly all pieces.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import final

from pagedkv.warming.parts import Entry


@final
class Runs:
    """The entries that wait, as one run for each process. May be used by several threads.

    Args:
        entries: all of them, in the order of the list.
        num_processes: the number of runs.
    """

    def __init__(self, entries: Sequence[Entry], num_processes: int) -> None:
        bounds = [len(entries) * process // num_processes for process in range(num_processes + 1)]
        self._runs = [deque(entries[bounds[i] : bounds[i + 1]]) for i in range(num_processes)]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def take(self, process: int) -> Entry | None:
        """Take the next entry of a process's run, or else the last of the longest run; None if none waits."""
        with self._lock:
            if self._runs[process]:
                return self._runs[process].popleft()
            longest = max(self._runs, key=len)
            return longest.pop() if longest else None

    def clear(self) -> None:
        """Drop all entries, so that processes end after the loops that they are compiling."""
        with self._lock:
            for run in self._runs:
                run.clear()
