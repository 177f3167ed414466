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
    """Requests in order of their keys. O(log n) to push or pop; O(waiting tenants) to find the first."""

    def __init__(self) -> None:
        self._heaps: dict[str | None, list[tuple[RequestKey, Request]]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        """Count the requests."""
        return self._num_requests

    def push(self, request: Request) -> None:
        """Add a request. Keys are unique."""
        heapq.heappush(self._heaps.setdefault(request.intent.tenant, []), (request.key, request))
        self._num_requests += 1

    def first(self, skipped: Collection[str | None] = NONE_SKIPPED) -> Request | None:
        """Return the first request of tenants that are not skipped, without removing it; None if there is none."""
        heads = (heap[0] for tenant, heap in self._heaps.items() if tenant not in skipped)
        first = min(heads, default=None)
        return None if first is None else first[1]

    def pop(self, request: Request) -> None:
        """Remove the first request of its tenant."""
        tenant = request.intent.tenant
        popped = heapq.heappop(self._heaps[tenant])[1]
        assert popped is request, f"request {request.number} is not the first of its tenant"
        self._shrink(tenant)

    def remove(self, request: Request) -> None:
        """Remove a request from any place. O(n)."""
        tenant = request.intent.tenant
        self._heaps[tenant].remove((request.key, request))
        heapq.heapify(self._heaps[tenant])
        self._shrink(tenant)

    def has_tenant(self, tenant: str | None) -> bool:
        """Whether a tenant has a waiting request."""
        return tenant in self._heaps

    def _shrink(self, tenant: str | None) -> None:
        self._num_requests -= 1
        if not self._heaps[tenant]:
            del self._heaps[tenant]
