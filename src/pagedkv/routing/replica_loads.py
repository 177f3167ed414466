"""ReplicaLoads: the outstanding work of each replica: prompts to compute, decoding requests, recent work."""

import math
from dataclasses import dataclass, field
from typing import final

from pagedkv.errors import ConfigurationError

__all__ = ["Outstanding", "ReplicaLoad", "ReplicaLoads"]


@dataclass(slots=True)
class Outstanding:
    """A request that was sent to a replica and has not ended.

    Args:
        replica: the replica.
        num_new_tokens: tokens of its prompt to be computed there.
        num_hit_tokens: tokens of its prompt that were cached there, or promised, when it was sent.
        sent_s: when it was sent.
        is_prefilled: whether its first token has arrived.
    """

    replica: str
    num_new_tokens: int
    num_hit_tokens: int
    sent_s: float
    is_prefilled: bool = False


@dataclass(slots=True)
class ReplicaLoad:
    """The load of one replica.

    Args:
        num_prefill_tokens: prompt tokens that are still to be computed.
        num_decoding: requests that have their first token and have not ended.
        recent_tokens: sum of the computed prompt tokens, with weights that decay with age.
        as_of_s: time for which ``recent_tokens`` is computed.
        requests: numbers of the outstanding requests.
    """

    num_prefill_tokens: int = 0
    num_decoding: int = 0
    recent_tokens: float = 0.0
    as_of_s: float = 0.0
    requests: set[int] = field(default_factory=set)


@final
class ReplicaLoads:
    """Loads by replica, and requests by number. A request counts from :meth:`begin` to :meth:`end`.

    Args:
        memory_s: seconds in which the weight of computed tokens decays by a factor of e.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._loads: dict[str, ReplicaLoad] = {}
        self._requests: dict[int, Outstanding] = {}

    def __len__(self) -> int:
        """Count the outstanding requests."""
        return len(self._requests)

    def add_replica(self, name: str) -> None:
        """Add a replica without load."""
        self._loads[name] = ReplicaLoad()

    def remove_replica(self, name: str) -> tuple[int, ...]:
        """Remove a replica; return its outstanding requests, which no longer count."""
        lost = tuple(sorted(self._loads.pop(name).requests))
        for request in lost:
            del self._requests[request]
        return lost

    def load(self, name: str, now_s: float) -> ReplicaLoad:
        """Return a replica's load at a time; the caller must not change it."""
        load = self._loads[name]
        if now_s > load.as_of_s:
            load.recent_tokens *= math.exp((load.as_of_s - now_s) / self._memory_s)
            load.as_of_s = now_s
        return load

    def begin(self, request: int, name: str, num_new_tokens: int, num_hit_tokens: int, now_s: float) -> None:
        """Count a request that was sent to a replica. Raises ConfigurationError if it is already outstanding."""
        if request in self._requests:
            where = self._requests[request].replica
            raise ConfigurationError(f"request {request} is already outstanding, on {where!r}")
        self._requests[request] = Outstanding(name, num_new_tokens, num_hit_tokens, now_s)
        load = self.load(name, now_s)
        load.requests.add(request)
        load.num_prefill_tokens += num_new_tokens
        load.recent_tokens += num_new_tokens

    def prefilled(self, request: int) -> None:
        """Count a request's prompt as computed. Does nothing for a request that is not outstanding."""
        outstanding = self._requests.get(request)
        if outstanding is not None and not outstanding.is_prefilled:
            outstanding.is_prefilled = True
            load = self._loads[outstanding.replica]
            load.num_prefill_tokens -= outstanding.num_new_tokens
            load.num_decoding += 1

    def end(self, request: int) -> None:
        """Stop counting a request, answered or not. Does nothing for a request that is not outstanding."""
        outstanding = self._requests.pop(request, None)
        if outstanding is None:
            return
        load = self._loads[outstanding.replica]
        load.requests.discard(request)
        if outstanding.is_prefilled:
            load.num_decoding -= 1
        else:
            load.num_prefill_tokens -= outstanding.num_new_tokens

    def take_back(self, request: int, now_s: float) -> Outstanding | None:
        """Stop counting a request that its replica did not take, also as recent work. None: it is not outstanding."""
        outstanding = self._requests.get(request)
        self.end(request)
        if outstanding is not None:
            load = self.load(outstanding.replica, now_s)
            age_s = load.as_of_s - outstanding.sent_s
            counted = outstanding.num_new_tokens * math.exp(-max(0.0, age_s) / self._memory_s)
            load.recent_tokens = max(0.0, load.recent_tokens - counted)
        return outstanding

    def check(self) -> None:
        """Check that loads are the sums of their requests. Raises AssertionError. O(requests)."""
        for name, load in self._loads.items():
            outstanding = [self._requests[request] for request in load.requests]
            assert all(each.replica == name for each in outstanding)
            waiting = sum(each.num_new_tokens for each in outstanding if not each.is_prefilled)
            assert waiting == load.num_prefill_tokens, f"{name}: {waiting} tokens, counted {load.num_prefill_tokens}"
            assert sum(each.is_prefilled for each in outstanding) == load.num_decoding
        assert sum(len(load.requests) for load in self._loads.values()) == len(self._requests)
