"""Router: chooses the replica that serves a request; the result is a :class:`~pagedkv.routing.Choice`.

A choice has its reason and all its inputs, for the log, a response's header and the pages.

The cost of a replica is measured in prompt tokens::

    cost = prompt tokens queued there + decode_tokens x outstanding requests
         + lack_weight x (tokens of this prompt - credit)
    credit = tokens cached on the device (or promised) + weight of the medium x tokens that a tier has behind them

An outstanding request counts with its prompt until its first token, and with its decoding from the beginning: one that
waits will decode too. With decoding requests alone, a burst of 400 prompts with one prefix went to one of three idle
replicas, since none of them had begun to decode. Now its prefix is computed anew on an idle replica as soon as that
costs less than the requests that wait where it is.

Queued tokens delay this request. Tokens that are not cached delay it too, and also take time from other requests, so
they weigh more. With ``lack_weight`` 1, the second request of a burst would compute its prefix on an idle replica,
since it would be ready there as soon as after the first request. (Dynamo's router adds the same terms, in blocks; its
documentation, release 1.2.)

A replica that has recently computed more than its share, by more than ``most_over_share``, is not chosen, whatever it
has cached, so that one popular prefix does not occupy one replica while others are idle.

ReplicaLoads counts the outstanding work of each replica: prompts to compute, decoding requests, recent work. Promises
are the blocks that routed prompts will store, as long as no event has confirmed them. So further requests of the same
prefix are routed to the same replica, before the events of the first one arrive. A promise ends with the event of its
block, when the request is taken back, or after its time: then the block was not stored, since the request was rejected,
or it was evicted before its event arrived. They are kept in two generations, and the older one is dropped whole, so
they last for one to two periods.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np

from pagedkv.blocks.digests import words_of_digests
from pagedkv.contract.answers import CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.arguments import as_choice, as_number
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import GroupSpec, TokenIds
from pagedkv.errors import ConfigurationError
from pagedkv.routing.prompts import HashedPrompt
from pagedkv.routing.replica_index import IndexState, Note, ReplicaIndex
from pagedkv.routing.residency import Residency

Routing: TypeAlias = Literal["prefix", "least-loaded", "round-robin"]
ROUTINGS: Final[tuple[Routing, ...]] = ("prefix", "least-loaded", "round-robin")
HOST: Final = "CPU"
NO_TIERS: Final[Mapping[str, int]] = {}


class RoutingReason(StrEnum):
    """Why a replica was chosen."""

    MOST_CACHED = "it has most of the prompt"
    NOT_CACHED = "no replica has any of the prompt, and it has the least to do"
    LEAST_LOADED = "it has the least to do"
    SHORTER_QUEUE = "another has more of the prompt, but its queue would take longer than computing the prompt here"
    BALANCE = "the replica of least cost has computed more than its share recently"
    ONLY = "it is the only one"
    ONLY_LEFT = "no other replica can take it now"
    UNAVAILABLE = "a replica with more of the prompt cannot take it now"
    IN_TURN = "it was its turn"


class Candidate(NamedTuple):
    """A replica's state when the router chose. A named tuple is made in 0.4 us, a frozen dataclass in 2.1.

    Args:
        name: the replica.
        state: how complete its index is.
        num_hit_tokens: tokens of the prompt that are cached there, or promised.
        num_promised_tokens: hit tokens that no event has confirmed yet.
        num_prefill_tokens: prompt tokens of outstanding requests that are still to be computed there.
        num_decoding: outstanding requests that have their first token.
        recent_tokens: recently computed tokens, weighted by age.
        cost: the cost that the router compared, in prompt tokens.
        is_over_share: whether it has recently computed more than its share.
        tier_tokens: further tokens of the prompt that it can load, by medium, the fastest first.
        credit: hit and loadable tokens, weighted by medium, which the cost counts as done.
        num_waiting: outstanding requests that have no token yet.
    """

    name: str
    state: IndexState
    num_hit_tokens: int
    num_promised_tokens: int
    num_prefill_tokens: int
    num_decoding: int
    recent_tokens: float
    cost: float
    is_over_share: bool = False
    tier_tokens: tuple[tuple[str, int], ...] = ()
    credit: float = 0.0
    num_waiting: int = 0

    def __str__(self) -> str:
        promised = f", {self.num_promised_tokens:,} of them promised" if self.num_promised_tokens else ""
        state = "" if self.state is IndexState.EXACT else f", index {self.state}"
        tiers = "".join(f", {count:,} in {medium}" for medium, count in self.tier_tokens)
        over = ", over its share" if self.is_over_share else ""
        return (
            f"{self.name}: {self.num_hit_tokens:,} tokens cached{promised}{tiers}{state}; "
            f"{self.num_prefill_tokens:,} tokens queued of {self.num_waiting} waiting, {self.num_decoding} decoding; "
            f"cost {self.cost:,.0f}{over}"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision.

    Args:
        replica: the chosen replica.
        reason: why it was chosen.
        num_prompt_tokens: tokens of the request's prompt.
        candidates: all replicas that were compared, the chosen one first.
        passed_over: the others, by name, each with the reason why it was not compared, if the caller has named them.
    """

    replica: str
    reason: RoutingReason
    num_prompt_tokens: int
    candidates: tuple[Candidate, ...]
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def chosen(self) -> Candidate:
        """The chosen replica's state when the router chose."""
        return self.candidates[0]

    def explain(self) -> str:
        """Return the decision as text, with a line for each replica."""
        head = f"{self.num_prompt_tokens:,} tokens go to {self.replica}: {self.reason}"
        others = (f"  {name}: passed over, {reason}" for name, reason in self.passed_over)
        return "\n".join([head, *(f"  {candidate}" for candidate in self.candidates), *others])


OF_THE_PROMPT: Final = (RoutingReason.MOST_CACHED, RoutingReason.NOT_CACHED)
"""Reasons that say of all replicas how much of the prompt they have."""


def as_weight(value: float, name: str) -> float:
    """Check a weight. Raises ConfigurationError: it is not between 0 and 1."""
    if not 0 <= as_number(value, name) <= 1:
        raise ConfigurationError(f"{name} must be between 0 and 1, got {value}")
    return value


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """The numbers of a router.

    Args:
        decode_tokens: cost of an outstanding request's decoding, in prompt tokens, from its arrival to its end.
        lack_weight: cost of each token of the prompt that a replica would have to compute.
        most_over_share: a replica is not chosen if its recently computed tokens, this prompt's included, exceed the
            mean of all replicas by more than this fraction and by more than ``share_slack_tokens``.
        share_slack_tokens: excess over the mean that is always allowed, in tokens.
        memory_s: seconds in which the weight of recently computed tokens decays by a factor of e.
        promise_s: promises last for one to two of these periods.
        host_weight: credit for each token that a replica can load from host memory; a cached one counts 1.
        tier_weight: the same for other media, until :meth:`Router.weigh` sets a measured one.

    Raises:
        ConfigurationError: a number is negative, a period is 0, or a weight is above 1.
    """

    decode_tokens: float = 32.0
    lack_weight: float = 2.0
    most_over_share: float = 0.1
    share_slack_tokens: float = 16_384.0
    memory_s: float = 60.0
    promise_s: float = 2.0
    host_weight: float = 0.75
    tier_weight: float = 0.5

    def __post_init__(self) -> None:
        for name in ("decode_tokens", "lack_weight", "most_over_share", "share_slack_tokens"):
            if as_number(getattr(self, name), name) < 0:
                raise ConfigurationError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("memory_s", "promise_s"):
            if as_number(getattr(self, name), name) <= 0:
                raise ConfigurationError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        for name in ("host_weight", "tier_weight"):
            as_weight(getattr(self, name), name)


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


@final
class Router:
    """Routes requests to the replicas of an index.

    Args:
        index: the replicas' cached blocks; the router adds and removes its replicas.
        routing: ``prefix``: by cost; ``least-loaded``: by the cost without cached blocks; ``round-robin``: in turn.
        rules: the numbers of the cost.
        note: called with all inputs and choices from the first one on, such as :class:`~pagedkv.routing.RecordWriter`.

    Raises:
        ConfigurationError: an unknown routing.
    """

    def __init__(
        self,
        index: ReplicaIndex,
        routing: Routing = "prefix",
        rules: RoutingRules | None = None,
        *,
        note: Note | None = None,
    ) -> None:
        self.index = index
        self.rules = rules or RoutingRules()
        as_choice(routing, ROUTINGS, "routing")
        self._routing = routing
        self._loads = ReplicaLoads(self.rules.memory_s)
        self._promises = Promises(index.cached_groups, self.rules.promise_s)
        self._turns = count()
        self._weights: dict[str, float] = {HOST: self.rules.host_weight}
        self.num_by_reason: dict[RoutingReason, int] = dict.fromkeys(RoutingReason, 0)
        self._note = note
        if note is not None:
            note("router", 0.0, {"routing": routing, "rules": self.rules})
            index.note_inputs(note)
        for name in index.names:
            self._loads.add_replica(name)
            self._noted("join", None, replica=name)

    @property
    def loads(self) -> ReplicaLoads:
        """Outstanding work of each replica."""
        return self._loads

    def add_replica(self, name: str, now_s: float = 0.0) -> None:
        """Add a replica. Raises ConfigurationError if the index has it already, or has 64 replicas."""
        self.index.add_replica(name, now_s)
        self._loads.add_replica(name)
        self._noted("join", now_s, replica=name)

    def remove_replica(self, name: str) -> tuple[int, ...]:
        """Remove a replica; return the numbers of its outstanding requests, which the caller should route again."""
        self._promises.clear(self.index.number_of(name))
        self.index.remove_replica(name)
        self._noted("leave", None, replica=name)
        return self._loads.remove_replica(name)

    def regroup(self, groups: Sequence[GroupSpec]) -> None:
        """Replace the index by an empty one of the same replicas for other groups. Work that is outstanding stays.

        Raises:
            ConfigurationError: no group has prefix caching, or the router records its inputs, which a replay could not
                follow.
        """
        if self._note is not None:
            raise ConfigurationError("a router that records its inputs cannot change its groups: make a new one")
        index = ReplicaIndex(groups)
        for name in self.index.names:
            index.add_replica(name)
        self.index, self._promises = index, Promises(index.cached_groups, self.rules.promise_s)

    def weigh(self, medium: str, weight: float, now_s: float) -> None:
        """Set the credit for a token in a medium below device memory, as measured: 1 less loading over computing it.

        Args:
            medium: name of the medium, as in events.
            weight: between 0 and 1.
            now_s: the caller's time.

        Raises:
            ConfigurationError: the weight is out of range.
        """
        if self._weights.get(medium) == as_weight(weight, f"the weight of {medium}"):
            return
        self._weights[medium] = weight
        self._noted("weight", now_s, medium=medium, weight=weight)

    def weight(self, medium: str) -> float:
        """Return the credit for a token in a medium below device memory."""
        return self._weights.get(medium, self.rules.tier_weight)

    def apply(  # noqa: PLR0913 - a batch, and what it proves
        self,
        name: str,
        lifetime: str,
        batch: int,
        events: Collection[CacheEvents | TierEvents],
        now_s: float,
        *,
        is_proven: bool = True,
    ) -> bool:
        """Apply a batch of events, as :meth:`ReplicaIndex.apply`, and end the promises of its blocks."""
        self._promises.settle(events, self.index.number_of(name))
        return self.index.apply(name, lifetime, batch, events, now_s, is_proven=is_proven)

    def note_alive(self, name: str, lifetime: str, next_batch: int, now_s: float, *, is_proven: bool = True) -> bool:
        """Apply a heartbeat, as :meth:`ReplicaIndex.note_alive`."""
        return self.index.note_alive(name, lifetime, next_batch, now_s, is_proven=is_proven)

    def restore(
        self, name: str, lifetime: str, next_batch: int, blocks: Collection[StoredBlocks | TierEvents], now_s: float
    ) -> None:
        """Replace the index of a replica by a snapshot, as :meth:`ReplicaIndex.restore`. Promises are not changed."""
        self.index.restore(name, lifetime, next_batch, blocks, now_s)

    def choose(
        self,
        request: int,
        token_ids: TokenIds,
        now_s: float,
        *,
        keys: RequestKeys = NO_KEYS,
        among: Iterable[str] | None = None,
    ) -> Choice:
        """Choose a replica for a request, and count the request as outstanding there until :meth:`ended`.

        Args:
            request: the caller's number of the request.
            token_ids: the prompt, int32 ``[n]``. A long one is kept for a while (:meth:`ReplicaIndex.hash`), and not
                copied for that if the array is read-only and owns its memory.
            keys: its extra keys and salt.
            now_s: the caller's time.
            among: replicas that may be chosen; None: all.

        Raises:
            ConfigurationError: no replica may be chosen, one is unknown, or the request is already outstanding.

        Cost: O(tokens + blocks x replicas).
        """
        return self.choose_hashed(request, self.index.hash(token_ids, keys), now_s, among=among)

    def choose_hashed(
        self, request: int, prompt: HashedPrompt, now_s: float, *, among: Iterable[str] | None = None
    ) -> Choice:
        """Choose a replica as :meth:`choose` does, for a prompt hashed by :meth:`ReplicaIndex.hash`."""
        names = self.index.names if among is None else tuple(among)
        if not names:
            raise ConfigurationError(
                "there is no replica to choose from: the router has none, or the given set is empty"
            )
        self._promises.advance(now_s)
        confirmed, hits = self.index.hits_and_promised(prompt, self._promises.generations)
        tiers = self._tier_hits(prompt, hits)
        candidates = self._candidates(names, now_s, prompt.num_tokens, hits, confirmed, tiers)
        chosen, reason = self._decide(candidates)
        if among is not None:
            reason = self._reason_among(names, chosen, reason, hits)
        num_new = prompt.num_tokens - round(chosen.credit)
        self._loads.begin(request, chosen.name, num_new, chosen.num_hit_tokens, now_s)
        num_confirmed = chosen.num_hit_tokens - chosen.num_promised_tokens
        self._promises.promise(prompt, self.index.number_of(chosen.name), num_confirmed)
        self.num_by_reason[reason] += 1
        if self._note is not None:
            of_prompt = {"num_tokens": prompt.num_tokens, "digests": prompt, "among": None if among is None else names}
            self._noted("arrival", now_s, request=request, **of_prompt, chosen=chosen.name, reason=str(reason))
        others = tuple(each for each in candidates if each.name != chosen.name)
        return Choice(chosen.name, reason, prompt.num_tokens, (chosen, *others))

    def take_back(self, request: int, prompt: HashedPrompt, now_s: float) -> None:
        """Take back the choice for a request that its replica did not take: there is no promise and no work of it.

        Args:
            request: the caller's number of the request. Does nothing if it is not outstanding.
            prompt: its prompt, as in :meth:`choose_hashed`.
            now_s: the caller's time.

        Cost: O(blocks).
        """
        outstanding = self._loads.take_back(request, now_s)
        if outstanding is not None:
            number = self.index.number_of(outstanding.replica)
            self._promises.withdraw(prompt, number, outstanding.num_hit_tokens)
            self._noted("take_back", now_s, request=request, num_tokens=prompt.num_tokens, digests=prompt)

    def prefilled(self, request: int) -> None:
        """Record that a request's first token has arrived."""
        self._loads.prefilled(request)
        self._noted("first_token", None, request=request)

    def ended(self, request: int) -> None:
        """Record that a request has ended, answered or not."""
        self._loads.end(request)
        self._noted("end", None, request=request)

    def _noted(self, kind: str, now_s: float | None, **values: object) -> None:
        if self._note is not None:
            self._note(kind, now_s, values)

    def _tier_hits(self, prompt: HashedPrompt, hits: Sequence[int]) -> dict[int, dict[str, int]]:
        """Return the tokens of a prompt that replicas can load, by number of the replica and medium."""
        media = self.index.tier_media
        if not media:
            return {}
        return self.index.tier_hits(prompt, hits, sorted(media, key=lambda medium: (-self.weight(medium), medium)))

    def _candidates(  # noqa: PLR0913, PLR0917 - a prompt, and its tokens by replica
        self,
        names: Sequence[str],
        now_s: float,
        num_tokens: int,
        hits: Sequence[int],
        confirmed: Sequence[int],
        tiers: Mapping[int, Mapping[str, int]],
    ) -> list[Candidate]:
        """Compute the cost of each replica; ``hits``, ``confirmed``, ``tiers`` are indexed by the replica's number."""
        index, rules, counts_hits = self.index, self.rules, self._routing == "prefix"
        numbers = [index.number_of(name) for name in names]
        loads = [self._loads.load(name, now_s) for name in names]
        mean = sum(load.recent_tokens for load in loads) / len(names)
        candidates = []
        for name, number, load in zip(names, numbers, loads, strict=True):
            num_hit = hits[number]
            of_tiers = tiers.get(number, NO_TIERS)
            credit = num_hit + sum(self.weight(medium) * count for medium, count in of_tiers.items())
            num_new = num_tokens - credit
            share = mean + num_new / len(names)
            most = max(share * (1 + rules.most_over_share), share + rules.share_slack_tokens)
            lacks = num_new if counts_hits else num_tokens
            cost = load.num_prefill_tokens + rules.lack_weight * lacks + rules.decode_tokens * len(load.requests)
            candidates.append(
                Candidate(
                    name,
                    index.state(name),
                    num_hit,
                    num_hit - confirmed[number],
                    load.num_prefill_tokens,
                    load.num_decoding,
                    load.recent_tokens,
                    cost,
                    load.recent_tokens + num_new > most,
                    tuple(of_tiers.items()),
                    credit,
                    len(load.requests) - load.num_decoding,
                )
            )
        return candidates

    def _decide(self, candidates: list[Candidate]) -> tuple[Candidate, RoutingReason]:
        if len(candidates) == 1:
            return candidates[0], RoutingReason.ONLY
        if self._routing == "round-robin":
            return candidates[next(self._turns) % len(candidates)], RoutingReason.IN_TURN
        cheapest = min(candidates, key=_by_cost)
        if self._routing == "least-loaded":
            return cheapest, RoutingReason.LEAST_LOADED
        chosen = cheapest
        if cheapest.is_over_share:
            chosen = min((each for each in candidates if not each.is_over_share), key=_by_cost, default=cheapest)
        most = max(each.credit for each in candidates)
        if chosen is not cheapest:
            reason = RoutingReason.BALANCE
        elif not most:
            reason = RoutingReason.NOT_CACHED
        elif chosen.credit < most:
            reason = RoutingReason.SHORTER_QUEUE
        else:
            some_lack = any(each.credit < most for each in candidates)
            reason = RoutingReason.MOST_CACHED if some_lack else RoutingReason.LEAST_LOADED
        return chosen, reason

    def _reason_among(
        self, names: Sequence[str], chosen: Candidate, reason: RoutingReason, hits: Sequence[int]
    ) -> RoutingReason:
        """Correct a reason where only some replicas could be chosen: what it says of the others must be true of all."""
        left_out = [name for name in self.index.names if name not in names]
        if not left_out:
            return reason
        if reason is RoutingReason.ONLY:
            return RoutingReason.ONLY_LEFT
        has_more = any(hits[self.index.number_of(name)] > chosen.num_hit_tokens for name in left_out)
        return RoutingReason.UNAVAILABLE if has_more and reason in OF_THE_PROMPT else reason


def _by_cost(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.cost, candidate.recent_tokens, candidate.name


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
