r"""A cluster: several engines as replicas of Ray Serve, and an HTTP front that routes requests by cached prefixes.

::

    a front (one process)                              replicas (a process each)
    Service -- ReplicatedEngine -- Serve's handle ---> EngineReplica -- AsyncLLM -- LLM
                     |        \     |
                     |         PrefixRequestRouter <--- events of blocks (sockets), numbers (Serve)
                     `-- Placements: the router's choices, with their reasons

Reading order: ``messages`` (values sent between front and replicas), ``placements`` (the router of one front, and its
latest choices), ``replica`` (an engine behind Serve, its specification), ``request_router`` (Serve's interface),
``replicated_engine`` (all replicas as one engine; an answer goes on at another one), ``deployment`` (the application of
Serve), ``routes`` (pages of replicas, choices and blocks).

Starting replicas, detecting that they died, and replacing them is left to Serve.
"""

from pagedkv.contract.extras import needing

with needing("cluster", "replicas"):
    import ray  # noqa: F401 - imported first, so that a missing package raises our MissingExtraError

from pagedkv.cluster.deployment import ClusterSpec, deploy, front, shut_down
from pagedkv.cluster.replica import ReplicaSpec
from pagedkv.cluster.replicated_engine import ReplicatedEngine
from pagedkv.cluster.request_router import PrefixRequestRouter
from pagedkv.cluster.routes import add_routes

__all__ = [
    "ClusterSpec",
    "PrefixRequestRouter",
    "ReplicaSpec",
    "ReplicatedEngine",
    "add_routes",
    "deploy",
    "front",
    "shut_down",
]
