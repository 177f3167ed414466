"""Placements: the router of one front, its replicas, and its latest choices.

A replica that has sent nothing for three heartbeats is chosen only if all are silent: its process is stopped or cut
off, which Serve notices a minute later or more. A replica that has never sent anything is no case of that: its events
do not reach this front, and its requests may. A request that a replica did not take is placed on another one, until all
have been tried.

Three kinds of threads use it: Serve's event loop places requests, the front's event loop reports first tokens and ends,
and a thread for each replica applies events. So one lock guards all state; it is held for microseconds.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final, final

from pagedkv.cluster.messages import HEARTBEAT_S, WEIGHTS, ReplicaFacts, RoutedRequest
from pagedkv.contract.keys import RequestKeys
from pagedkv.errors import ConfigurationError
from pagedkv.routing import Choice, ReplicaIndex, ReplicaView, Router, Routing, RoutingRules
from pagedkv.routing.routers import HOST
from pagedkv.wire import FollowedMessage, follow

MOST_CHOICES: Final = 1000
MOST_SILENT_S: Final = 3 * HEARTBEAT_S


@dataclass(frozen=True, slots=True)
class Placed:
    """The choice of a replica for one request.

    Args:
        number: the request's number.
        attempt: 1, and one more after each lost replica.
        choice: the replica, and the reason.
        num_answered: tokens of its answer that another replica had sent.
        placed_s: time of the choice, in seconds of the Unix epoch.
    """

    number: int
    attempt: int
    choice: Choice
    num_answered: int
    placed_s: float


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """A change of the replicas that can serve.

    Args:
        added: facts of the added replicas, by name.
        removed: facts of the removed ones.
        num_replicas: replicas that can serve now.
    """

    added: Mapping[str, ReplicaFacts]
    removed: Mapping[str, ReplicaFacts]
    num_replicas: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's state, as far as the front has it.

    Args:
        name: Serve's name of the replica.
        facts: its constant properties.
        view: state of its index.
        num_prefill_tokens: prompt tokens of outstanding requests that are still to be computed.
        num_decoding: outstanding requests that have their first token.
        numbers: its last reported numbers: running and waiting requests, blocks.
        is_silent: whether it has missed three heartbeats.
    """

    name: str
    facts: ReplicaFacts
    view: ReplicaView
    num_prefill_tokens: int
    num_decoding: int
    numbers: Mapping[str, Any]
    is_silent: bool


@final
class Placements:
    """Places requests on replicas.

    Args:
        routing, rules: as in :class:`~pagedkv.routing.Router`.
        clock: returns monotonic seconds.
        wall_clock: returns seconds of the Unix epoch.

    Attributes:
        on_replicas: called with each change of the replicas, by the thread that reports it; None: nothing is called.
        num_moved: moves of requests from a lost replica to another one; a request may move several times.
    """

    def __init__(
        self,
        routing: Routing = "prefix",
        rules: RoutingRules | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._routing: Routing = routing
        self._rules = rules
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._router: Router | None = None
        self._facts: dict[str, ReplicaFacts] = {}
        self._numbers: dict[str, Mapping[str, Any]] = {}
        self._heard_s: dict[str, float] = {}  # of replicas of which a message has arrived
        self._choices: dict[tuple[int, int], Placed] = {}
        self.on_replicas: Callable[[ReplicaChange], None] | None = None
        self.num_moved = 0

    def set_replicas(self, replicas: Mapping[str, ReplicaFacts]) -> ReplicaChange:
        """Set the replicas that can serve now; return the added and the removed ones.

        Outstanding requests of a removed replica no longer count: their streams end, and they are placed again.
        """
        with self._lock:
            removed = {name: facts for name, facts in self._facts.items() if name not in replicas}
            added = {name: facts for name, facts in replicas.items() if name not in self._facts}
            for name in removed:
                del self._facts[name]
                self._numbers.pop(name, None)
                self._heard_s.pop(name, None)
                self._require_router().remove_replica(name)
            for name, facts in added.items():
                if self._router is None:
                    index = ReplicaIndex(facts.groups, weights_epoch=facts.weights_epoch)
                    self._router = Router(index, self._routing, self._rules)
                self._facts[name] = facts
                self._router.add_replica(name, self._clock())
            change = ReplicaChange(added, removed, len(self._facts))
        if self.on_replicas is not None and (added or removed):
            self.on_replicas(change)
        return change

    def note_numbers(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Record the numbers that a replica reported."""
        with self._lock:
            if name in self._facts:
                self._numbers[name] = numbers
                self._weigh()

    def note_heard(self, name: str, silent_s: float) -> None:
        """Record how long ago the last message of a replica's events arrived."""
        with self._lock:
            if name in self._facts:
                self._heard_s[name] = self._clock() - silent_s

    def should_leave(self, name: str) -> bool:
        """Whether a replica is silent while another one is not, so that requests should not wait for it."""
        with self._lock:
            silent = self._silent(self._facts)
            return name in silent and len(silent) < len(self._facts)

    def place(self, request: RoutedRequest, names: Sequence[str]) -> Choice | None:
        """Choose among replicas; None: the facts of none have arrived yet. O(tokens + blocks x replicas).

        Serve calls this again for a request that it could not send, since the replica ended, did not answer or was
        full. The new choice replaces the earlier one of the same attempt, and is another replica if there is one. With
        one candidate left, all replicas have been tried, or all but this one: it is time to wait between attempts.
        """
        with self._lock:
            known = [name for name in names if name in self._facts]
            if not known:
                return None
            router, now_s = self._require_router(), self._clock()
            tokens = request.known_token_ids  # an array of its own
            tokens.setflags(write=False)
            prompt = router.index.hash(tokens, RequestKeys(salt=request.intent.salt))
            router.take_back(request.number, prompt, now_s)
            if request.choice is not None:
                request.failed = [name for name in request.failed if name != request.choice.replica]
                request.failed.append(request.choice.replica)
            among, passed_over = self._eligible(request, known)
            choice = router.choose_hashed(request.number, prompt, now_s, among=among)
            choice = replace(choice, passed_over=passed_over)
            request.choice = choice
            key = request.number, request.attempt
            self._choices.pop(key, None)  # an earlier choice of this attempt was not sent
            self._choices[key] = Placed(*key, choice, len(request.intent.answered), self._wall_clock())
            if len(self._choices) > MOST_CHOICES:
                del self._choices[next(iter(self._choices))]
            return choice

    def _eligible(self, request: RoutedRequest, known: list[str]) -> tuple[list[str], tuple[tuple[str, str], ...]]:
        """Return the replicas that may be chosen, and of the others the reasons."""
        silent = self._silent(known)
        answering = [name for name in known if name not in silent] or known
        among = [name for name in answering if name not in request.failed]
        if not among:  # all were tried, and are tried again, the latest one last
            request.failed = request.failed[-1:]
            among = [name for name in answering if name not in request.failed] or answering
        return among, tuple(
            (name, f"no message for {silent[name]:.1f} s" if name in silent else "it did not take the request")
            for name in known
            if name not in among
        )

    def _silent(self, names: Iterable[str]) -> dict[str, float]:
        """Return the replicas that have missed three heartbeats, and for how many seconds they have sent nothing."""
        now_s = self._clock()
        ages = {name: now_s - self._heard_s.get(name, now_s) for name in names}
        return {name: age_s for name, age_s in ages.items() if age_s > MOST_SILENT_S}

    def prefilled(self, number: int) -> None:
        """Record that a request's first token has arrived."""
        with self._lock:
            if self._router is not None:
                self._router.prefilled(number)

    def ended(self, number: int) -> None:
        """Record that a request has ended, or that its replica was lost."""
        with self._lock:
            if self._router is not None:
                self._router.ended(number)

    def note_moved(self) -> None:
        """Count a move: another replica will continue a request."""
        with self._lock:
            self.num_moved += 1

    def take(self, name: str, message: FollowedMessage) -> None:
        """Apply a message with a replica's events to the index. Called by the thread that reads them."""
        with self._lock:
            if name not in self._facts:
                return
            follow(self._require_router(), name, message, self._clock())

    # For pages and metrics

    def replicas(self) -> list[ReplicaStatus]:
        """Return the state of each replica."""
        with self._lock:
            now_s = self._clock()
            silent = self._silent(self._facts)
            return [self._status(name, now_s, is_silent=name in silent) for name in self._facts]

    def latest(self, most: int = MOST_CHOICES) -> list[Placed]:
        """Return the latest choices, the newest first."""
        with self._lock:
            return list(itertools.islice(reversed(self._choices.values()), most))

    def num_by_reason(self) -> dict[str, int]:
        """Count the choices by reason."""
        with self._lock:
            counts = {} if self._router is None else self._router.num_by_reason
            return {str(reason): count for reason, count in counts.items() if count}

    def numbers(self) -> list[Mapping[str, Any]]:
        """Return the last reported numbers of the replicas."""
        with self._lock:
            return list(self._numbers.values())

    @property
    def num_replicas(self) -> int:
        """Number of replicas that can serve."""
        return len(self._facts)

    def check(self) -> None:
        """Check that loads are the sums of the outstanding requests. Raises AssertionError."""
        with self._lock:
            if self._router is not None:
                self._router.loads.check()

    @property
    def num_outstanding(self) -> int:
        """Number of requests that were placed and have not ended."""
        with self._lock:
            return 0 if self._router is None else len(self._router.loads)

    def _weigh(self) -> None:
        """Set the router's weight of each medium: the mean of what replicas have measured."""
        measured: dict[str, list[float]] = {}
        for numbers in self._numbers.values():
            for medium, weight in numbers.get(WEIGHTS, {}).items():
                measured.setdefault(medium, []).append(weight)
        for medium, weights in measured.items():
            if medium != HOST:  # its weight is one of the rules
                self._require_router().weigh(medium, round(fmean(weights), 2), self._clock())

    def _status(self, name: str, now_s: float, *, is_silent: bool) -> ReplicaStatus:
        router = self._require_router()
        load = router.loads.load(name, now_s)
        view = router.index.view(name)
        facts = self._facts[name]
        numbers = self._numbers.get(name, {})
        return ReplicaStatus(name, facts, view, load.num_prefill_tokens, load.num_decoding, numbers, is_silent)

    def _require_router(self) -> Router:
        if self._router is None:
            raise ConfigurationError("the router has no replica yet")
        return self._router
