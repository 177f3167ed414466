r"""A cluster: several engines as replicas of Ray Serve, behind one HTTP front that routes by what they have cached.

::

    a front (one process)                              replicas (a process each)
    Service -- ReplicatedEngine -- Serve's handle ---> EngineReplica -- AsyncLLM -- LLM
                     |        \     |
                     |         PrefixRequestRouter <--- events of blocks (sockets), numbers (Serve)
                     `-- Placements: the router's choices, with their reasons

Reading order: ``spec`` (what replicas serve), ``messages`` (what travels), ``answer_so_far`` (what a client has of an
answer, and how it is continued elsewhere), ``placements`` (the router of one front, and its latest choices),
``replica`` (an engine behind Serve), ``request_router`` (Serve's interface), ``replicated_engine`` (all replicas as
one engine), ``remote_formats`` (formats of answers, whose matchers replicas build), ``deployment`` (the application
of Serve), ``routes`` (a page that shows replicas and choices).

Serve starts replicas, notices their deaths, and starts others; nothing here does.
"""

from pagedkv.memory.contract.extras import needing

with needing("cluster", "replicas"):
    import ray  # noqa: F401 - imported first, so that a missing package raises our MissingExtraError

from pagedkv.serving.cluster.deployment import ClusterSpec, deploy, front, shut_down
from pagedkv.serving.cluster.replicated_engine import ReplicatedEngine
from pagedkv.serving.cluster.request_router import PrefixRequestRouter
from pagedkv.serving.cluster.routes import add_routes
from pagedkv.serving.cluster.spec import ReplicaSpec

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
