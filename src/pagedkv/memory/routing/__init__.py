"""Routing: which replica of a cluster serves a request, and why. The same decisions in service and in simulation.

Reading order: ``residency`` (which replicas have a block), ``hit_lengths`` (what a prompt hits, for all groups of a
model), ``prompts`` (the digests of a prompt), ``replica_index`` (replicas, their lifetimes and events), ``promises``
(what routed prompts will store), ``replica_loads`` (what is outstanding), ``choice`` (a decision with its reason),
``routers``, which decide, and ``recorded`` (inputs and choices as a file, and their replay). No thread, no clock, no
I/O: times and events are the caller's.
"""

from pagedkv.memory.routing.choice import Candidate, Choice, RoutingReason
from pagedkv.memory.routing.prompts import HashedPrompt
from pagedkv.memory.routing.recorded import RecordWriter, ReplayedChoice, replay
from pagedkv.memory.routing.replica_index import IndexState, ReplicaIndex, ReplicaView
from pagedkv.memory.routing.routers import ROUTINGS, Router, Routing, RoutingRules

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
