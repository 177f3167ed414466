"""Routing: chooses the replica that serves a request. Public import path of :mod:`pagedkv.memory.routing`."""

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
