"""Which replica of a cluster serves a request, and why. A door: the room is :mod:`pagedkv.memory.routing`."""

from pagedkv.memory.routing import (
    ROUTINGS,
    Candidate,
    Choice,
    HashedPrompt,
    IndexState,
    RecordWriter,
    ReplayedChoice,
    ReplicaIndex,
    ReplicaView,
    Router,
    Routing,
    RoutingReason,
    RoutingRules,
    replay,
)

__all__ = [
    "ROUTINGS",
    "Candidate",
    "Choice",
    "HashedPrompt",
    "IndexState",
    "RecordWriter",
    "ReplayedChoice",
    "ReplicaIndex",
    "ReplicaView",
    "Router",
    "Routing",
    "RoutingReason",
    "RoutingRules",
    "replay",
]
