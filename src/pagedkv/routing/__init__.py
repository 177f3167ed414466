"""Routing: chooses the replica of a cluster that serves a request. Serving and simulation use the same code.

Reading order: ``residency`` (which replicas have a block), ``hit_lengths`` (how many tokens of a prompt hit, for all
groups of a model), ``prompts`` (the digests of a prompt), ``replica_index`` (replicas, their lifetimes and events),
``promises`` (blocks that routed prompts will store), ``replica_loads`` (outstanding requests), ``choice`` (a decision
with its reason), ``routers`` (make decisions), and ``recorded`` (inputs and choices as a file, and their replay). No
thread, no clock, no I/O: the caller passes times and events.
"""

from pagedkv.routing.choice import Candidate, Choice, RoutingReason
from pagedkv.routing.prompts import HashedPrompt
from pagedkv.routing.recorded import RecordWriter, ReplayedChoice, replay
from pagedkv.routing.replica_index import IndexState, ReplicaIndex, ReplicaView
from pagedkv.routing.routers import ROUTINGS, Router, Routing, RoutingRules

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
