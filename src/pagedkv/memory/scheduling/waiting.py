"""The waiting requests, in the order of admission: by priority, then by arrival.

A preempted request returns with its old key, and so is ahead of all that arrived after it.
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
        """Add a request. Keys are unique."""
        heapq.heappush(self._heap, (request.key, request))

    def first(self) -> Request:
        """Return the next request without removing it; there must be one."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """Remove and return the next request."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """Remove a request from any place. O(n)."""
        self._heap.remove((request.key, request))
        heapq.heapify(self._heap)
