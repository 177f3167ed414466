"""What a router expects of requests that it has sent: blocks that they will store, and work that they are.

ReplicaLoads counts the outstanding work of each replica: prompts to compute, decoding requests, recent work.

Promises are the blocks that routed prompts will store, as long as no event has confirmed them. So further requests of
the same prefix are routed to the same replica, before the events of the first one arrive. A promise ends with the event
of its block, when the request is taken back, or after its time: then the block was not stored, since the request was
rejected, or it was evicted before its event arrived. They are kept in two generations, and the older one is dropped
whole, so they last for one to two periods.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from pagedkv.blocks.digests import words_of_digests
from pagedkv.contract.answers import CacheEvents, TierEvents
from pagedkv.errors import ConfigurationError
from pagedkv.routing.prompts import HashedPrompt
from pagedkv.routing.residency import Residency

__all__ = ["Outstanding", "Promises", "ReplicaLoad", "ReplicaLoads"]


@final
class Promises:
    """Promised blocks of all replicas.

    Args:
        cached_groups: number, block size and pool of each cached group.
        period_s: promises last for one to two periods.
    """

    def __init__(self, cached_groups: Sequence[tuple[int, int, str]], period_s: float) -> None:
        self._groups = [(number, size) for number, size, _ in cached_groups]
        self._period_s = period_s
        self._began_s = 0.0
        self._young, self._old = Residency(), Residency()

    def advance(self, now_s: float) -> None:
        """Drop promises whose time is over."""
        if now_s >= self._began_s + self._period_s:
            is_long = now_s >= self._began_s + 2 * self._period_s
            self._old, self._young = (
                self._young,
                self._old,
            )  # the table is cleared and used again, which is faster than allocating a new one
            self._young.empty()
            if is_long:
                self._old.empty()
            self._began_s = now_s

    @property
    def generations(self) -> tuple[Residency, Residency]:
        """The younger and the older promises."""
        return self._young, self._old

    def promise(self, prompt: HashedPrompt, replica: int, num_confirmed_tokens: int = 0) -> None:
        """Promise a prompt's blocks after the confirmed tokens to a replica, by its number. O(blocks)."""
        for number, size in self._groups:
            digests = prompt.digests[size][num_confirmed_tokens // size :]
            self._young.add(digests, np.full(len(digests), number, np.int32), replica)

    def withdraw(self, prompt: HashedPrompt, replica: int, num_hit_tokens: int) -> None:
        """End the promises that a prompt made to a replica beyond the tokens that hit there before. O(blocks)."""
        for number, size in self._groups:
            digests = prompt.digests[size][num_hit_tokens // size :]
            groups = np.full(len(digests), number, np.int32)
            for generation in (self._young, self._old):
                generation.remove(digests, groups, replica)

    def settle(self, events: Iterable[CacheEvents | TierEvents], replica: int) -> None:
        """End the promises of blocks whose events arrived; promises are of the device alone. O(events)."""
        for each in events:
            if isinstance(each, TierEvents):
                continue
            words = words_of_digests(each.digests, len(each.kinds))
            is_block = each.groups >= 0
            for generation in (self._young, self._old):
                generation.remove(words[is_block], each.groups[is_block], replica)

    def clear(self, replica: int) -> None:
        """Drop the promises of a replica, when it is removed."""
        self._young.clear(replica)
        self._old.clear(replica)


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
