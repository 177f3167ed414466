"""Routing: chooses the replica of a cluster that serves a request. Serving and simulation use the same code.

Reading order: ``residency`` (which replicas have a block, and how many tokens of a prompt hit there), ``prompts`` (the
digests of a prompt), ``tier_entries`` (what replicas can load), ``replica_index`` (replicas, their lifetimes and
events), ``routers`` (what routed requests will store, and their work; choices, with reasons),
and ``recorded`` (inputs and choices as a file, and their replay). No thread, no clock, no I/O: the caller passes times
and events.
"""

from pagedkv.routing.prompts import HashedPrompt
from pagedkv.routing.recorded import RecordWriter, ReplayedChoice, replay
from pagedkv.routing.replica_index import IndexState, ReplicaIndex, ReplicaView
from pagedkv.routing.routers import ROUTINGS, Candidate, Choice, Router, Routing, RoutingReason, RoutingRules

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
