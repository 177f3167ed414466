"""Who waits, in the order in which they are to be admitted: by priority, then by arrival.

A preempted request comes back under its old key, and so ahead of all that arrived after it.
"""

import heapq

from pagedkv.memory.scheduling.request import Request, RequestKey

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Requests in order of their keys. O(log n) to push or pop."""

    def __init__(self) -> None:
        self._heap: list[tuple[RequestKey, Request]] = []

    def __len__(self) -> int:
        """Count the requests."""
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Let a request wait. No two have the same key."""
        heapq.heappush(self._heap, (request.key, request))

    def first(self) -> Request:
        """Look at the request that comes next; there must be one."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take the request that comes next."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """Let a request wait no more, wherever it stands. O(n)."""
        self._heap.remove((request.key, request))
        heapq.heapify(self._heap)
