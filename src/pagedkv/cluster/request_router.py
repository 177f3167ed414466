"""PrefixRequestRouter: our router behind the interface of Ray Serve (``RequestRouter``, alpha in Ray 2.60).

Serve makes it inside a front's handle, so the front cannot pass objects to it. Each request carries a link to its
front, and the router reports its choice and its placements there::

    choose_replicas    Placements.place: the choice, with its reason
    update_replicas    added and removed replicas, and their numbers
    a thread           events of each replica, to the index

``tests/cluster/test_ray_interface.py`` checks the parts of Ray that this module uses.
"""

import threading
from typing import Any, Final, final

from pagedkv.cluster.messages import ReplicaCall, ReplicaFacts, RoutedRequest
from pagedkv.cluster.placements import Placements
from pagedkv.contract.extras import needing
from pagedkv.events import EventFollower
from pagedkv.routing import Routing, RoutingRules

with needing("cluster", "replicas"):
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

POLL_S: Final = 0.2
FACTS: Final = "facts"


@final
class _Listener:
    """Reads one replica's events in a thread, and applies them to the index."""

    def __init__(self, name: str, facts: ReplicaFacts, placements: Placements) -> None:
        self._name = name
        self._facts = facts
        self._placements = placements
        self._is_over = threading.Event()
        threading.Thread(target=self._listen, name=f"pagedkv events {name}", daemon=True).start()

    def end(self) -> None:
        """End the thread within ``POLL_S`` seconds."""
        self._is_over.set()

    def _listen(self) -> None:
        facts = self._facts
        with EventFollower(facts.events, facts.replays, facts.groups) as follower:
            while not self._is_over.is_set():
                for message in follower.poll(POLL_S):
                    self._placements.take(self._name, message)
                if follower.silent_s is not None:
                    self._placements.note_heard(self._name, follower.silent_s)


@final
class PrefixRequestRouter(RequestRouter):
    """Routes by the replicas' cached blocks and outstanding work."""

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ANN401 - as Serve calls it
        """Make the router. Serve calls it with ``request_router_kwargs``: ``routing``, and ``rules`` by name."""
        routing: Routing = kwargs.get("routing", "prefix")
        self._placements = Placements(routing, RoutingRules(**kwargs.get("rules", {})))
        self._listeners: dict[str, _Listener] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the running replicas, and record their numbers."""
        super().update_replicas(replicas)
        self._take_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._take_replicas()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose one replica for a request, take the named one for a call, and leave other choices to Serve.

        Serve asks again if it cannot send the request there: at once, or after a pause if ``should_backoff`` is set.
        """
        by_name = {_name_of(each): each for each in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        context = pending_request.routing_context
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, RoutedRequest):
            choice = self._placements.place(request, list(by_name))
            if choice is not None:
                request.link.placed(request, self._placements)
                context.should_backoff |= len(choice.candidates) == 1  # all have been tried, from now on
                return [[by_name[choice.replica]]]
        context.should_backoff = True
        if isinstance(request, ReplicaCall):
            request.link.take(self._placements)
            if request.replica in by_name:
                return [[by_name[request.replica]]]
        return [candidate_replicas]

    def _take_replicas(self) -> None:
        replicas = {_name_of(each): each for each in self.curr_replicas.values()}
        facts = {
            name: each.replica_metadata[FACTS] for name, each in replicas.items() if FACTS in each.replica_metadata
        }
        change = self._placements.set_replicas(facts)
        for name in change.removed:
            self._listeners.pop(name).end()
        for name, each in change.added.items():
            self._listeners[name] = _Listener(name, each, self._placements)
        for name, replica in replicas.items():
            if replica.routing_stats:
                self._placements.note_numbers(name, replica.routing_stats)


def _name_of(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)
