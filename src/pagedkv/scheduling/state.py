"""SchedulerState: the waiting, running, swapped-out and decoding requests, shared by all phases of a step.

Waiting requests stand in a :class:`WaitingQueue` in the order of admission: by priority, then by arrival. A preempted
request is queued with its old key, before all that arrived after it. Each tenant has its own queue, so that a tenant at
its cap can be skipped without iterating over its requests.

The scheduler has no tiers. It calls a :class:`Loader` for each request that could be admitted now::

    waiting --could be admitted--> loader.begins_load? --no--> admitted
       ^                                 | yes
       +-- Scheduler.loaded(request) -- loading              others are admitted and compute meanwhile

A request that waits for a load has no row. The blocks of the load are reserved in the space
(:meth:`BlockSpace.load <pagedkv.BlockSpace.load>`), so running requests may run short of blocks because of it. Then the
loads are ended before any request is preempted.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from operator import attrgetter
from typing import Final, Protocol

from pagedkv.contract.answers import Shortage
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import keeps_state, keeps_whole_prefix
from pagedkv.scheduling.config import SchedulingConfig
from pagedkv.scheduling.keeping import LeaseBook, lease_breakpoints, release
from pagedkv.scheduling.request import Batch, Decoding, Request, RequestKey
from pagedkv.space import BlockSpace, PrefixHit

NONE_SKIPPED: Final[frozenset[str | None]] = frozenset()


class Loader(Protocol):
    """Begins and ends loads."""

    def begins_load(self, request: Request, token_ids: Int32Array, match: PrefixHit) -> bool:
        """Begin a load after a request's hit, or join one under way; return whether the request must wait for it.

        Args:
            request: a request that could be admitted now.
            token_ids: int32 ``[n]``, its known tokens that may hit.
            match: their hit. It is no longer valid if the result is True.
        """
        ...

    def give_way(self) -> bool:
        """End all loads under way, as failed, so that their blocks are free; return whether there were any."""
        ...


class WaitingQueue:
    """Requests in order of their keys. O(log n) to push, pop or remove; O(waiting tenants) to find the first.

    A removed request keeps its entry until this is the first of its heap, or until half of all entries are such ones.

    Attributes:
        requests: the requests, with the number of each one's valid entry.
    """

    def __init__(self) -> None:
        self._heaps: dict[str | None, list[tuple[RequestKey, int, Request]]] = {}  # the first entry of each is valid
        self.requests: dict[Request, int] = {}
        self._num_pushed = 0
        self._num_entries = 0

    def push(self, request: Request) -> None:
        """Add a request. Keys are unique."""
        self._num_pushed += 1
        self.requests[request] = self._num_pushed
        heapq.heappush(self._heaps.setdefault(request.intent.tenant, []), (request.key, self._num_pushed, request))
        self._num_entries += 1

    def first(self, skipped: Collection[str | None] = NONE_SKIPPED) -> Request | None:
        """Return the first request of tenants that are not skipped, without removing it; None if there is none."""
        heads = (heap[0] for tenant, heap in self._heaps.items() if tenant not in skipped)
        first = min(heads, default=None)
        return None if first is None else first[2]

    def remove(self, request: Request) -> None:
        """Remove a request from any place."""
        del self.requests[request]
        self._drop_former_heads(request.intent.tenant)
        if self._num_entries > 2 * len(self.requests):
            self._drop_former_entries()

    def has_tenant(self, tenant: str | None) -> bool:
        """Whether a tenant has a waiting request."""
        return tenant in self._heaps

    def _is_valid(self, entry: tuple[RequestKey, int, Request]) -> bool:
        return self.requests.get(entry[2]) == entry[1]

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
        self._num_entries = len(self.requests)


BY_KEY = attrgetter("key")


class SchedulerState:
    """The state of a scheduler.

    Args:
        config: the limits.
        space: the block space.
        loader: loads prefixes from tiers; None: prefixes are computed.

    Attributes:
        waiting, running, swapped: the waiting, running and swapped-out requests, in order of their keys.
        loading: the requests that wait for a load, in the order in which they began to wait.
        prefilling: running requests with known tokens that are not scheduled, in order of their keys.
        in_flight: unfinished batches, oldest first.
        decoding: the requests that decode together now; another object once they change.
        block_size: the largest block size of the groups, in tokens.
        keeps_states: whether prompts are split at checkpoints of recurrent states, which takes one more step.
        replays: whether evicted windows may be computed again.
        leases: the leases at breakpoints; None if the space has no leases.
        drops_blocks: whether a group drops blocks of rows that grow, as windows and states do.
        splits_leases: whether chunks end at breakpoints, since windows and states can be leased only at a chunk's end.
        has_newcomers: whether a running request can decode that did not in the step before.
        num_changes: incremented whenever the running rows change.
        is_draining: whether nothing is scheduled until the batches in flight are finished, since blocks are short.
    """

    def __init__(self, config: SchedulingConfig, space: BlockSpace, loader: Loader | None = None) -> None:
        self.config = config
        self.space = space
        self.loader = loader
        self.waiting = WaitingQueue()
        self.loading: dict[Request, None] = {}
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.prefilling: list[Request] = []
        self.in_flight: deque[Batch] = deque()
        self.num_changes = 0
        self.is_draining = False
        self.block_size = max(group.block_size for group in space.config.groups)
        config_of_space = space.config
        self.keeps_states = config_of_space.prefix_caching and any(
            keeps_state(group) and group.prefix_caching for group in config_of_space.groups
        )
        self.replays = bool(config_of_space.replaying)
        self.leases = LeaseBook() if config_of_space.leases and config_of_space.prefix_caching else None
        self.drops_blocks = not all(map(keeps_whole_prefix, config_of_space.groups))
        self.splits_leases = self.leases is not None and self.drops_blocks
        self.decoding: Decoding | None = None
        self.has_newcomers = False

    def join(self, request: Request) -> None:
        """Make a request that has its blocks a running one."""
        insort(self.running, request, key=BY_KEY)
        self.num_changes += 1
        if request.num_unscheduled:
            insort(self.prefilling, request, key=BY_KEY)
        else:
            self.has_newcomers = True

    def prefill_again(self, request: Request) -> None:
        """Schedule known tokens of a running request again."""
        _discard(self.prefilling, request)
        insort(self.prefilling, request, key=BY_KEY)

    def prefilled(self, request: Request) -> None:
        """Record that all known tokens of a request are scheduled, whether it runs already or not."""
        _discard(self.prefilling, request)

    def leave(self, request: Request) -> None:
        """Remove a request from the running ones."""
        if request.decoding is not None:
            self.close_decoding()
        _discard(self.running, request)
        _discard(self.prefilling, request)
        self.num_changes += 1

    def free(self, request: Request, *, is_over: bool) -> None:
        """Remove a request from the running ones, and free its blocks.

        ``is_over``: whether it ends; False: it is preempted.
        """
        self.free_rows(request, request.rows, is_over=is_over)
        self.leave(request)

    def requeue(self, request: Request) -> None:
        """Free the rows of a running or swapped-out request, and queue it again with its known tokens."""
        if request in self.swapped:
            self.free_rows(request, request.rows, is_over=False)
            self.swapped.remove(request)
        else:
            self.free(request, is_over=False)
        request.start_over()
        self.waiting.push(request)

    def free_rows(self, request: Request, rows: list[int], *, is_over: bool = True) -> None:
        """Free rows of a request, by its intent if ``is_over``, and add their receipts to the request."""
        if self.space.config.counts_epochs and request not in self.swapped:
            for span in (span for row in rows for span in self.space.epochs(row)):
                request.note_epochs(span.oldest, span.newest)
        if is_over:
            request.note_receipts(release(self.space, request, rows))
        else:
            num_generated = [request.num_generated] * len(rows)
            request.note_receipts(self.space.free(rows, num_generated=num_generated, keeps_end=True))

    def note_computed(self, request: Request, num_computed: int) -> None:
        """Lease the tokens before breakpoints that a request has reached."""
        if self.leases is not None and request.intent.breakpoints and not request.is_done:
            lease_breakpoints(self.space, self.leases, request, num_computed)

    def num_running_sequences(self) -> int:
        """Count the sequences of all running requests, including those still to be forked. O(running requests)."""
        return sum(request.num_sequences for request in self.running)

    def next_to_run(self, skipped: Collection[str | None] = NONE_SKIPPED) -> Request | None:
        """Return the first of the waiting and swapped-out requests, except those of skipped tenants; None if none."""
        waiting = self.waiting.first(skipped)
        if not self.swapped:
            return waiting
        swapped = next((request for request in self.swapped if request.intent.tenant not in skipped), None)
        if swapped is not None and (waiting is None or swapped.key < waiting.key):
            return swapped
        return waiting

    def will_be_free(self, shortage: Shortage) -> bool:
        """Whether the missing blocks will be free when the steps in flight are acknowledged."""
        num_free = shortage.num_free if shortage.share is None else shortage.share.num_permitted
        return shortage.num_needed <= num_free + self.space.num_deferred_blocks(shortage.pool)

    def has_tenant(self, tenant: str) -> bool:
        """Whether a request of a tenant waits, runs or is swapped out. O(running, loading and swapped-out requests)."""
        under_way = (*self.running, *self.swapped, *self.loading)
        return self.waiting.has_tenant(tenant) or any(request.intent.tenant == tenant for request in under_way)

    def is_in_flight(self, awaited: object) -> bool:
        """Whether an unfinished batch samples the awaited tokens."""
        return any(awaited is batch.decoding or awaited in batch.prefilling for batch in self.in_flight)

    @property
    def awaits_blocks(self) -> bool:
        """Whether a block may come free: held by a row, a load or a step in flight, which all end, or absent."""
        pools, space = self.space.config.pool_names, self.space
        counts = (space.num_live_blocks, space.num_deferred_blocks, space.num_absent_blocks)
        return any(count(pool) for pool in pools for count in counts)

    @property
    def is_computing(self) -> bool:
        """Whether a batch in flight computes anything."""
        return any(len(batch.plan.compute.rows) for batch in self.in_flight)

    # Sequences that decode together

    def without_request(self, decoding: Decoding, request: Request) -> Decoding | None:
        """Remove a request that no longer runs from the sequences that the open step decodes."""
        others = [other for other in decoding.requests if other is not request]
        for other in others:
            other.awaited = ()  # the open step's token, which the new object counts
        self.decoding = Decoding(others, is_scheduled=True) if others else None
        return self.decoding

    def close_decoding(self) -> None:
        """Close the current ``Decoding``; its progress is written back to its requests."""
        if self.decoding is not None:
            self.decoding.close()
            self.decoding = None


def _discard(requests: list[Request], request: Request) -> None:
    """Remove a request from a list in order of keys, if it is there. O(log n), and moving what follows it."""
    place = bisect_left(requests, request.key, key=BY_KEY)
    if place < len(requests) and requests[place] is request:
        del requests[place]
