"""Placements: the router of one front, its replicas, and its latest choices.

Requests are placed in the event loop of Serve's handle, first tokens are noted in the front's, and events are read in
threads, so one lock guards all of it; what it guards takes microseconds.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.routing import Choice, ReplicaIndex, ReplicaView, Router, Routing, RoutingRules
from pagedkv.memory.wire import FollowedMessage, follow
from pagedkv.serving.cluster.messages import ReplicaFacts, RoutedRequest

__all__ = ["Placed", "Placements", "SeenReplica"]

MOST_CHOICES: Final = 1000


@dataclass(frozen=True, slots=True)
class Placed:
    """One choice.

    Args:
        number: of the request; choice: where it went, and why.
        num_answered: tokens of its answer that another replica had sent.
        placed_s: seconds of the Unix epoch.
    """

    number: int
    choice: Choice
    num_answered: int
    placed_s: float


@dataclass(frozen=True, slots=True)
class SeenReplica:
    """A replica, as the front sees it.

    Args:
        name: Serve's; facts: what does not change; view: its index.
        num_prefill_tokens: tokens of prompts that it is to compute; num_decoding: requests that decode there.
        numbers: what it said of itself last: requests that run and wait, blocks.
    """

    name: str
    facts: ReplicaFacts
    view: ReplicaView
    num_prefill_tokens: int
    num_decoding: int
    numbers: Mapping[str, Any]


@final
class Placements:
    """Places requests on replicas.

    Args:
        routing, rules: as of :class:`~pagedkv.routing.Router`.
        clock: returns monotonic seconds; wall_clock: seconds of the Unix epoch.
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
        self._choices: deque[Placed] = deque(maxlen=MOST_CHOICES)
        self.num_moved = 0

    def set_replicas(self, replicas: Mapping[str, ReplicaFacts]) -> tuple[list[str], list[str]]:
        """Take the replicas that can serve now; return the names of those that came and that went.

        Requests that were outstanding on a replica that went count no longer; their streams end, and they come again.
        """
        with self._lock:
            gone = [name for name in self._facts if name not in replicas]
            come = [name for name in replicas if name not in self._facts]
            for name in gone:
                del self._facts[name]
                self._numbers.pop(name, None)
                self._require_router().remove_replica(name)
            for name in come:
                facts = replicas[name]
                if self._router is None:
                    index = ReplicaIndex(facts.groups, weights_epoch=facts.weights_epoch)
                    self._router = Router(index, self._routing, self._rules)
                self._facts[name] = facts
                self._router.add_replica(name, self._clock())
            return come, gone

    def note_numbers(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Note what a replica says of itself."""
        with self._lock:
            if name in self._facts:
                self._numbers[name] = numbers

    def place(self, request: RoutedRequest, names: Sequence[str]) -> Choice | None:
        """Choose among replicas; None: none of them is known yet. O(tokens + blocks x replicas).

        A request that was placed and not sent, since its replica went or was full, is placed anew.
        """
        with self._lock:
            among = [name for name in names if name in self._facts]
            if not among:
                return None
            router = self._require_router()
            router.ended(request.number)
            tokens = request.known_token_ids
            choice = router.choose(request.number, tokens, self._clock(), keys=request.intent.keys, among=among)
            placed = Placed(request.number, choice, len(request.intent.answered), self._wall_clock())
            if self._choices and self._choices[-1].number == request.number:
                self._choices.pop()  # it was not sent
            self._choices.append(placed)
            return choice

    def prefilled(self, number: int) -> None:
        """Note that a request's first token came."""
        with self._lock:
            if self._router is not None:
                self._router.prefilled(number)

    def ended(self, number: int) -> None:
        """Note that a request ended, or that its replica was lost."""
        with self._lock:
            if self._router is not None:
                self._router.ended(number)

    def note_moved(self) -> None:
        """Count a request that another replica is to continue."""
        with self._lock:
            self.num_moved += 1

    def take(self, name: str, message: FollowedMessage) -> None:
        """Apply a message of a replica's events to the index. Called in the threads that read them."""
        with self._lock:
            if name not in self._facts:
                return
            follow(self._require_router(), name, message, self._clock())

    # What a person sees

    def seen(self) -> list[SeenReplica]:
        """Return the replicas."""
        with self._lock:
            now_s = self._clock()
            return [self._seen(name, now_s) for name in self._facts]

    def latest(self, most: int = MOST_CHOICES) -> list[Placed]:
        """Return the latest choices, the newest first."""
        with self._lock:
            return list(itertools.islice(reversed(self._choices), most))

    def num_by_reason(self) -> dict[str, int]:
        """Count the choices by reason."""
        with self._lock:
            counts = {} if self._router is None else self._router.num_by_reason
            return {str(reason): count for reason, count in counts.items() if count}

    def numbers(self) -> list[Mapping[str, Any]]:
        """Return what the replicas said of themselves last."""
        with self._lock:
            return list(self._numbers.values())

    @property
    def num_replicas(self) -> int:
        """Replicas that can serve."""
        return len(self._facts)

    def check(self) -> None:
        """Check that loads are the sums of the outstanding requests. Raises AssertionError."""
        with self._lock:
            if self._router is not None:
                self._router.loads.check()

    @property
    def num_outstanding(self) -> int:
        """Requests that were placed and have not ended."""
        with self._lock:
            return 0 if self._router is None else len(self._router.loads)

    def _seen(self, name: str, now_s: float) -> SeenReplica:
        router = self._require_router()
        load = router.loads.load(name, now_s)
        view = router.index.view(name)
        facts = self._facts[name]
        return SeenReplica(name, facts, view, load.num_prefill_tokens, load.num_decoding, self._numbers.get(name, {}))

    def _require_router(self) -> Router:
        if self._router is None:
            raise ConfigurationError("there is no replica yet")
        return self._router
