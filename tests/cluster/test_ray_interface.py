"""What is used of Ray's alpha interface: where a new version differs, this says what has changed."""

import inspect

import ray
from ray.serve import request_router
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pagedkv.cluster import PrefixRequestRouter


def parameters(method: object) -> list[str]:
    """Return the names of a method's parameters."""
    assert callable(method)
    return list(inspect.signature(method).parameters)


def test_the_version_is_the_one_that_was_read() -> None:
    assert ray.__version__.split(".")[:2] == ["2", "60"], "read ray.serve.request_router anew, then change this"


def test_a_router_is_called_as_it_was() -> None:
    assert parameters(RequestRouter.choose_replicas) == ["self", "candidate_replicas", "pending_request"]
    assert inspect.iscoroutinefunction(RequestRouter.choose_replicas)
    assert parameters(RequestRouter.initialize_state) == ["self", "kwargs"]
    assert parameters(RequestRouter.update_replicas) == ["self", "replicas"]
    assert parameters(RequestRouter.on_replica_actor_died) == ["self", "replica_id"]
    assert isinstance(RequestRouter.curr_replicas, property)
    for name in ("choose_replicas", "update_replicas", "on_replica_actor_died"):
        ours, theirs = getattr(PrefixRequestRouter, name), getattr(RequestRouter, name)
        assert parameters(ours) == parameters(theirs)


def test_a_router_sees_what_it_saw() -> None:
    assert {"args", "kwargs", "metadata"} <= set(PendingRequest.__dataclass_fields__)
    for name in ("replica_id", "routing_stats", "replica_metadata", "max_ongoing_requests"):
        assert isinstance(getattr(RunningReplica, name), property), name
    assert {"PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"} <= set(request_router.__all__)
    config = set(RequestRouterConfig.model_fields)
    assert {"request_router_class", "request_router_kwargs", "request_routing_stats_period_s"} <= config
