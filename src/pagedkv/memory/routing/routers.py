"""Routers: which replica serves a request. Each decision is a :class:`~pagedkv.routing.Choice`, with its reason.

The cost of a replica is in tokens of prompts::

    cost = tokens of prompts queued there + lack_weight x tokens of this prompt that it lacks
         + decode_tokens x decoding requests

What is queued delays this request; what the prompt lacks delays it too, and takes time from all others. So with
``lack_weight`` 1 the second request of a burst would compute its prefix on an idle replica, since that is as soon as
behind the first. (Dynamo's router adds the same terms, in blocks; its documentation, release 1.2.)

A replica that has computed more than its share of late, by more than ``most_over_share``, is passed over, whatever it
has cached: one prefix must not occupy one replica while others are idle.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal, TypeAlias, final

from pagedkv.memory.contract.arguments import as_choice, as_number
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.contract.events import CacheEvents, StoredBlocks
from pagedkv.memory.contract.keys import NO_KEYS, RequestKeys
from pagedkv.memory.contract.spec import TokenIds
from pagedkv.memory.routing.choice import Candidate, Choice, RoutingReason
from pagedkv.memory.routing.promises import Promises
from pagedkv.memory.routing.prompts import HashedPrompt
from pagedkv.memory.routing.replica_index import Note, ReplicaIndex
from pagedkv.memory.routing.replica_loads import ReplicaLoads

__all__ = ["ROUTINGS", "Router", "Routing", "RoutingRules"]

Routing: TypeAlias = Literal["prefix", "least-loaded", "round-robin"]
ROUTINGS: Final[tuple[Routing, ...]] = ("prefix", "least-loaded", "round-robin")


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """The numbers of a router.

    Args:
        decode_tokens: tokens of prompts that a decoding request counts as.
        lack_weight: how often a token counts that a replica would have to compute for the request.
        most_over_share: a replica is passed over if what it computed of late, with this prompt, is above the mean of
            all by more than this fraction and by more than ``share_slack_tokens``.
        share_slack_tokens: so much more than the mean is always allowed.
        memory_s: seconds after which computed tokens weigh a third.
        promise_s: promises last for one to two of these periods.

    Raises:
        ConfigurationError: a number is negative, or a period is 0.
    """

    decode_tokens: float = 64.0
    lack_weight: float = 2.0
    most_over_share: float = 0.1
    share_slack_tokens: float = 16_384.0
    memory_s: float = 60.0
    promise_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("decode_tokens", "lack_weight", "most_over_share", "share_slack_tokens"):
            if as_number(getattr(self, name), name) < 0:
                raise ConfigurationError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("memory_s", "promise_s"):
            if as_number(getattr(self, name), name) <= 0:
                raise ConfigurationError(f"{name} must be above 0 seconds, got {getattr(self, name)}")


@final
class Router:
    """Routes requests to the replicas of an index.

    Args:
        index: what replicas have cached; the router adds and removes its replicas.
        routing: "prefix" by cost; "least-loaded" by the cost of a prompt that no replica has; "round-robin" in turn.
        rules: the numbers.
        note: takes all inputs and choices from the first one on, as :class:`~pagedkv.routing.RecordWriter` does.

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
        """What is outstanding."""
        return self._loads

    def add_replica(self, name: str, now_s: float = 0.0) -> None:
        """Add a replica. Raises ConfigurationError: it is there already, or there are too many."""
        self.index.add_replica(name, now_s)
        self._loads.add_replica(name)
        self._noted("join", now_s, replica=name)

    def remove_replica(self, name: str) -> tuple[int, ...]:
        """Remove a replica; return the numbers of its outstanding requests, which are to be routed again."""
        self._promises.clear(self.index.number_of(name))
        self.index.remove_replica(name)
        self._noted("leave", None, replica=name)
        return self._loads.remove_replica(name)

    def apply(self, name: str, lifetime: str, batch: int, events: Collection[CacheEvents], now_s: float) -> bool:
        """Apply a batch of events, as :meth:`ReplicaIndex.apply`; it settles the promises of its blocks."""
        self._promises.settle(events, self.index.number_of(name))
        return self.index.apply(name, lifetime, batch, events, now_s)

    def note_alive(self, name: str, lifetime: str, next_batch: int, now_s: float) -> bool:
        """Take a heartbeat, as :meth:`ReplicaIndex.note_alive`."""
        return self.index.note_alive(name, lifetime, next_batch, now_s)

    def restore(
        self, name: str, lifetime: str, next_batch: int, blocks: Collection[StoredBlocks], now_s: float
    ) -> None:
        """Replace what the index has of a replica, as :meth:`ReplicaIndex.restore`. Promises stay until their end."""
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
            request: a number of the caller's.
            token_ids: the prompt, int32 ``[n]``; keys: its extra keys and salt.
            now_s: the caller's clock.
            among: replicas that may be chosen; None: all.

        Raises:
            ConfigurationError: no replica may be chosen, an unknown one is named, or the request is outstanding.

        Cost: O(tokens + blocks x replicas).
        """
        return self.choose_hashed(request, self.index.hash(token_ids, keys), now_s, among=among)

    def choose_hashed(
        self, request: int, prompt: HashedPrompt, now_s: float, *, among: Iterable[str] | None = None
    ) -> Choice:
        """Choose a replica for a prompt that :meth:`ReplicaIndex.hash` has hashed; else as :meth:`choose`."""
        names = self.index.names if among is None else tuple(among)
        if not names:
            raise ConfigurationError("no replica can serve: there is none, or none of those that may be chosen")
        self._promises.advance(now_s)
        confirmed, hits = self.index.hits_and_promised(prompt, self._promises.generations)
        seen = self._candidates(names, now_s, prompt.num_tokens, hits, confirmed)
        chosen, reason = self._decide(seen)
        self._loads.begin(request, chosen.name, prompt.num_tokens - chosen.num_hit_tokens, now_s)
        num_confirmed = chosen.num_hit_tokens - chosen.num_promised_tokens
        self._promises.promise(prompt, self.index.number_of(chosen.name), num_confirmed)
        self.num_by_reason[reason] += 1
        if self._note is not None:
            of_prompt = {"num_tokens": prompt.num_tokens, "digests": prompt, "among": None if among is None else names}
            self._noted("arrival", now_s, request=request, **of_prompt, chosen=chosen.name, reason=str(reason))
        others = tuple(each for each in seen if each.name != chosen.name)
        return Choice(chosen.name, reason, prompt.num_tokens, (chosen, *others))

    def prefilled(self, request: int) -> None:
        """Note that a request's first token came."""
        self._loads.prefilled(request)
        self._noted("first_token", None, request=request)

    def ended(self, request: int) -> None:
        """Note that a request ended, whatever became of it."""
        self._loads.end(request)
        self._noted("end", None, request=request)

    def _noted(self, kind: str, now_s: float | None, **values: object) -> None:
        if self._note is not None:
            self._note(kind, now_s, values)

    def _candidates(
        self, names: Sequence[str], now_s: float, num_tokens: int, hits: Sequence[int], confirmed: Sequence[int]
    ) -> list[Candidate]:
        """Weigh replicas; ``hits`` and ``confirmed`` are by number of a replica."""
        index, rules, counts_hits = self.index, self.rules, self._routing == "prefix"
        numbers = [index.number_of(name) for name in names]
        loads = [self._loads.load(name, now_s) for name in names]
        mean = sum(load.recent_tokens for load in loads) / len(names)
        seen = []
        for name, number, load in zip(names, numbers, loads, strict=True):
            num_hit = hits[number]
            num_new = num_tokens - num_hit
            share = mean + num_new / len(names)
            most = max(share * (1 + rules.most_over_share), share + rules.share_slack_tokens)
            lacks = num_new if counts_hits else num_tokens
            cost = load.num_prefill_tokens + rules.lack_weight * lacks + rules.decode_tokens * load.num_decoding
            seen.append(
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
                )
            )
        return seen

    def _decide(self, seen: list[Candidate]) -> tuple[Candidate, RoutingReason]:
        if len(seen) == 1:
            return seen[0], RoutingReason.ONLY
        if self._routing == "round-robin":
            return seen[next(self._turns) % len(seen)], RoutingReason.IN_TURN
        cheapest = min(seen, key=_by_cost)
        if self._routing == "least-loaded":
            return cheapest, RoutingReason.LEAST_LOADED
        chosen = cheapest
        if cheapest.is_over_share:
            chosen = min((each for each in seen if not each.is_over_share), key=_by_cost, default=cheapest)
        most = max(each.num_hit_tokens for each in seen)
        if chosen is not cheapest:
            reason = RoutingReason.BALANCE
        elif not most:
            reason = RoutingReason.NOT_CACHED
        else:
            reason = RoutingReason.MOST_CACHED if chosen.num_hit_tokens == most else RoutingReason.SHORTER_QUEUE
        return chosen, reason


def _by_cost(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.cost, candidate.recent_tokens, candidate.name
