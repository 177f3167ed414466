"""The application of Ray Serve: replicas of an engine, and a front for deployments by a config file.

``pagedkv serve --replicas N`` runs the front in its own process, and Serve runs the replicas alone (:func:`deploy`).
A config file of Serve names :func:`front`, and Serve runs fronts too::

    applications:
    - name: pagedkv
      import_path: pagedkv.cluster:front
      args: {model: ./my-llama, replicas: 4, memory_gib: 8}
"""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

from starlette.types import ASGIApp, Receive, Scope, Send

from pagedkv.cluster.messages import ReplicaFacts
from pagedkv.cluster.replica import POLICY, EngineReplica, ReplicaSpec
from pagedkv.cluster.replicated_engine import ReplicatedEngine
from pagedkv.cluster.routes import add_routes
from pagedkv.contract.arguments import as_choice, as_count
from pagedkv.contract.extras import needing
from pagedkv.contract.space_config import GIB
from pagedkv.engine import EngineConfig
from pagedkv.engine.llm import compile_loops
from pagedkv.errors import ConfigurationError
from pagedkv.routing import ROUTINGS, Routing
from pagedkv.routing.residency import MOST_REPLICAS
from pagedkv.server import ApiKeys, OpenAccess, ServerConfig, Service, create_app
from pagedkv.server.engines import tokenizer_of

with needing("cluster", "replicas"):
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.handle import DeploymentHandle

APPLICATION: Final = "pagedkv"
ROUTER: Final = "pagedkv.cluster.request_router:PrefixRequestRouter"
STATS_PERIOD_S: Final = 1.0
HEALTH_PERIOD_S: Final = 2.0
START_TIMEOUT_S: Final = 1800.0
CONNECT_TIMEOUT_S: Final = 5.0
LOCAL_ADDRESS: Final = "local"
"""Ray's address for a new cluster of this process, also if another one runs on the machine."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster.

    Args:
        replica: model, engine and limits of each replica.
        num_replicas: number of replicas, at most 64; with ``autoscaling`` the smallest number.
        routing: how requests are routed.
        rules: fields of :class:`~pagedkv.routing.RoutingRules`, by name.
        router: import path of another router of Serve, for comparisons; None: :class:`PrefixRequestRouter`.
        num_cpus, num_gpus: Ray's resources of each replica.
        autoscaling: fields of Serve's ``AutoscalingConfig``; None: the number of replicas is fixed. Without ``policy``
            and ``target_ongoing_requests`` the policy is :func:`~pagedkv.cluster.replica.scale_by_blocks`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    replica: ReplicaSpec
    num_replicas: int = 2
    routing: Routing = "prefix"
    rules: Mapping[str, float] = field(default_factory=dict)
    router: str | None = None
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    autoscaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        as_count(self.num_replicas, "num_replicas", least=1, most=MOST_REPLICAS)
        as_choice(self.routing, ROUTINGS, "routing")


def deploy(spec: ClusterSpec, *, address: str | None = None) -> ReplicatedEngine:
    """Start the replicas, and wait until they serve; return them as one engine.

    Args:
        spec: the cluster.
        address: of a running Ray cluster; None: that of the variable RAY_ADDRESS, else Ray is started on this machine.

    Raises:
        ConfigurationError: Ray or the replicas do not start; Serve's logs have the reasons.
    """
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL_ADDRESS
    if address == LOCAL_ADDRESS and spec.replica.engine.warm_up:
        compile_loops(spec.replica.engine)  # once, instead of in every replica
    _require_reachable(address)
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends no usage statistics unless enabled
        ray.init(
            address=address,
            include_dashboard=False if address == LOCAL_ADDRESS else None,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    if address == LOCAL_ADDRESS:
        _require_gpus(spec)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    try:
        handle = serve.run(_engines(spec), name=APPLICATION, route_prefix=None)
    except RuntimeError as problem:
        raise ConfigurationError(f"the replicas do not start: {problem}. Ray's logs are in /tmp/ray") from problem
    return ReplicatedEngine(handle, _facts_of(handle.facts.remote().result(timeout_s=START_TIMEOUT_S)))


def shut_down() -> None:
    """End the replicas and Serve, and Ray if this process started it. Does nothing if Ray was not started."""
    if ray.is_initialized():  # else Serve would start Ray only to end it
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Refuse an address HOST:PORT that cannot be connected to; Ray itself would wait for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdigit():
        return  # Ray resolves "local", "auto" and URLs
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as problem:
        raise ConfigurationError(f"no Ray cluster answers at {address}: {problem}") from None


def _require_gpus(spec: ClusterSpec) -> None:
    """Refuse a cluster that needs more GPUs than this machine has, since its replicas would wait without end."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    needed, available = spec.num_replicas * spec.num_gpus, resources.get("GPU", 0.0)
    if needed > available:
        raise ConfigurationError(
            f"{spec.num_replicas} replicas of {spec.num_gpus:g} GPUs need {needed:g}, and this machine has "
            f"{available:g}: take fewer replicas or fewer GPUs for each, or name a cluster"
        )


def _engines(spec: ClusterSpec) -> Any:  # noqa: ANN401 - an application of Serve, which has no types
    scaling = (
        {"num_replicas": spec.num_replicas}
        if spec.autoscaling is None
        else {"autoscaling_config": AutoscalingConfig(**autoscaling_of(spec))}
    )
    ours = {"routing": spec.routing, "rules": dict(spec.rules)}
    routing: dict[str, Any] = {
        "request_router_class": ROUTER if spec.router is None else spec.router,
        "request_router_kwargs": ours if spec.router is None else {},
        "request_routing_stats_period_s": STATS_PERIOD_S,
    }
    most = spec.replica.max_waiting + spec.replica.engine.max_sequences
    deployment: Any = serve.deployment(
        EngineReplica,
        name="engines",
        max_ongoing_requests=most,
        health_check_period_s=HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus},
        request_router_config=RequestRouterConfig(**routing),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **scaling,
    )
    return deployment.bind(spec.replica)


def autoscaling_of(spec: ClusterSpec) -> dict[str, Any]:
    """Return the fields of Serve's ``AutoscalingConfig``: our policy, unless the given fields name or need another."""
    given = dict(spec.autoscaling or {})
    ours: Any = AutoscalingPolicy(policy_function=POLICY)  # type: ignore[no-untyped-call]
    by_blocks = {} if "target_ongoing_requests" in given else {"policy": ours}
    return {"min_replicas": spec.num_replicas, **by_blocks, **given}


def _facts_of(answer: object) -> ReplicaFacts:
    assert isinstance(answer, ReplicaFacts)
    return answer


# Fronts that Serve runs


@final
class _Front:
    """A front in a process of Serve: the HTTP application over the replicas.

    Args:
        config: configuration of the server.
        api_keys: path of a file of keys; None: the server is open.
        model: folder or name of the model, for its tokenizer; None: the model of the demonstration.
        engines: the handle of the replicas.
    """

    def __init__(
        self, config: ServerConfig, api_keys: str | None, model: str | None, engines: DeploymentHandle[Any]
    ) -> None:
        self._config = config
        self._api_keys = api_keys
        self._model = model
        self._engines = engines

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application. Serve calls it once."""
        return _LazyApp(self)

    async def build(self) -> ASGIApp:
        """Build the application from the facts of a replica."""
        engine = ReplicatedEngine(self._engines, _facts_of(await self._engines.facts.remote()))
        access = OpenAccess() if self._api_keys is None else ApiKeys.read(Path(self._api_keys))
        service = Service(engine, self._config, access, tokenizer=tokenizer_of(self._model))
        app = create_app(service)
        add_routes(app, service, engine)
        return app


@final
class _LazyApp:
    """An ASGI application that is built at its first call: its lifespan's begin."""

    def __init__(self, front: _Front) -> None:
        self._front = front
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = await self._front.build()
        await self._app(scope, receive, send)


def front(args: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an application of Serve, which has no types
    """Build the application that a config file of Serve names.

    Args:
        args: ``model`` (a folder or a name; without it the model of the demonstration), ``name``, ``dtype``,
            ``memory_gib``, ``num_blocks``, ``block_size``, ``max_tokens``, ``max_sequences``, ``max_waiting``,
            ``replicas``, ``fronts``, ``routing``, ``rules``, ``num_cpus``, ``num_gpus``, ``autoscaling``, ``api_keys``,
            ``host``, ``inspector``.

    Raises:
        ConfigurationError: an argument is unknown, or its value cannot be served.
    """
    unknown = sorted(set(args) - KNOWN)
    if unknown:
        raise ConfigurationError(f"unknown arguments {', '.join(unknown)}; known are {', '.join(sorted(KNOWN))}")
    model, api_keys = args.get("model"), args.get("api_keys")
    named = {name: args[name] for name in ENGINE if name in args}
    engine = EngineConfig(**named)
    if "memory_gib" in args:
        engine = replace(engine, kv_nbytes=int(args["memory_gib"] * GIB))
    spec = ClusterSpec(
        ReplicaSpec(
            model,
            args.get("dtype", "float32"),
            engine,
            None if api_keys is None else ApiKeys.read(Path(api_keys)).limits,
            **{name: args[name] for name in ("max_waiting", "host", "inspector") if name in args},
        ),
        args.get("replicas", 2),
        **{name: args[name] for name in ("routing", "rules", "num_cpus", "num_gpus", "autoscaling") if name in args},
    )
    config = ServerConfig(args.get("name") or ("demo" if model is None else Path(model).name))
    deployment: Any = serve.deployment(
        serve.ingress()(_Front), name="front", num_replicas=args.get("fronts", 1), max_ongoing_requests=10_000
    )
    return deployment.bind(config, api_keys, model, _engines(spec))


ENGINE: Final = ("num_blocks", "block_size", "max_tokens", "max_sequences", "max_batched_tokens", "overlap")
KNOWN: Final = frozenset(
    {
        *ENGINE,
        *("model", "name", "dtype", "memory_gib", "max_waiting", "host", "api_keys", "replicas", "fronts"),
        *("routing", "rules", "num_cpus", "num_gpus", "autoscaling", "inspector"),
    }
)
