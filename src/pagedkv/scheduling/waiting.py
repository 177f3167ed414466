"""WaitingQueue: the waiting requests in the order of admission: by priority, then by arrival.

A preempted request is queued with its old key, before all that arrived after it. Each tenant has its own queue, so that
a tenant at its cap can be skipped without iterating over its requests.
"""

import heapq
from collections.abc import Collection
from typing import Final

from pagedkv.scheduling.request import Request, RequestKey

__all__ = ["NONE_SKIPPED", "WaitingQueue"]

NONE_SKIPPED: Final[frozenset[str | None]] = frozenset()


class WaitingQueue:
    """Requests in order of their keys. O(log n) to push, pop or remove; O(waiting tenants) to find the first.

    A removed request keeps its entry until this is the first of its heap, or until half of all entries are such ones.
    """

    def __init__(self) -> None:
        self._heaps: dict[str | None, list[tuple[RequestKey, int, Request]]] = {}  # the first entry of each is valid
        self._tickets: dict[Request, int] = {}  # the number of each request's valid entry
        self._num_pushed = 0
        self._num_entries = 0

    def __len__(self) -> int:
        """Count the requests."""
        return len(self._tickets)

    def push(self, request: Request) -> None:
        """Add a request. Keys are unique."""
        self._num_pushed += 1
        self._tickets[request] = self._num_pushed
        heapq.heappush(self._heaps.setdefault(request.intent.tenant, []), (request.key, self._num_pushed, request))
        self._num_entries += 1

    def first(self, skipped: Collection[str | None] = NONE_SKIPPED) -> Request | None:
        """Return the first request of tenants that are not skipped, without removing it; None if there is none."""
        heads = (heap[0] for tenant, heap in self._heaps.items() if tenant not in skipped)
        first = min(heads, default=None)
        return None if first is None else first[2]

    def remove(self, request: Request) -> None:
        """Remove a request from any place."""
        del self._tickets[request]
        self._drop_former_heads(request.intent.tenant)
        if self._num_entries > 2 * len(self._tickets):
            self._drop_former_entries()

    def has_tenant(self, tenant: str | None) -> bool:
        """Whether a tenant has a waiting request."""
        return tenant in self._heaps

    def _is_valid(self, entry: tuple[RequestKey, int, Request]) -> bool:
        return self._tickets.get(entry[2]) == entry[1]

    def _drop_former_heads(self, tenant: str | None) -> None:
        heap = self._heaps[tenant]
        while heap and not self._is_valid(heap[0]):
            heapq.heappop(heap)
            self._num_entries -= 1
        if not heap:
            del self._heaps[tenant]

    def _drop_former_entries(self) -> None:
        for heap in self._heaps.values():
            heap[:] = filter(self._is_valid, heap)
            heapq.heapify(heap)
        self._num_entries = len(self._tickets)
