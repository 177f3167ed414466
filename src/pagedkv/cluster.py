"""Replicas of an engine on Ray Serve, behind one front. Public import path of :mod:`pagedkv.serving.cluster`."""

from pagedkv.serving.cluster import (
    ClusterSpec,
    PrefixRequestRouter,
    ReplicaSpec,
    ReplicatedEngine,
    add_routes,
    deploy,
    front,
    shut_down,
)

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
