"""Builds the parts of ``pagedkv serve``: access, the service and its engine, the request log."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine import Chat, EngineConfig
from pagedkv.engine.prompts import chat_text
from pagedkv.errors import ConfigurationError, OutputError, RequestError
from pagedkv.routing import Routing
from pagedkv.server import (
    Access,
    ApiKeys,
    LocalEngine,
    OpenAccess,
    RequestLog,
    ServerConfig,
    Service,
    SharedKeys,
    StepLog,
    add_inspected,
    add_inspector,
    create_app,
)
from pagedkv.server.engine_process import EventEndpoints, ProcessEngine, ProcessSpec
from pagedkv.server.engines import build_engine, tokenizer_of
from pagedkv.server.parsing import parser_name, require_reasoning_parser

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pagedkv.server.config import Inspector


@dataclass(frozen=True, slots=True)
class Replicas:
    """The number of engines, and the routing of requests to them.

    Args:
        number: engines; 1: one, without Ray.
        routing: how requests are routed.
        ray: address of a running Ray cluster; None: Ray is started on this machine.
        num_gpus: GPUs that each replica takes.
    """

    number: int = 1
    routing: Routing = "prefix"
    ray: str | None = None
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A model to serve, and the settings of its engines, its server and its callers.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: type of its weights.
        engine: memory and limits of each engine.
        config: settings of the server.
        callers: identifies callers.
        events: endpoints of KV events; None: they are not published.
        draft_model: a folder or a name of the model that guesses tokens; None: there is none.
        device: for the models' weights and blocks; auto: a GPU where there is one.
        has_own_process: whether a single engine has a process of its own.
        chat_template: in place of the tokenizer's own; None: that one.
    """

    model: str | None
    dtype: str
    engine: EngineConfig
    config: ServerConfig
    callers: Access
    events: EventEndpoints | None = None
    draft_model: str | None = None
    device: str = "auto"
    has_own_process: bool = True
    chat_template: str | None = None

    @property
    def tenants(self) -> Mapping[str, TenantLimits] | None:
        """Limits of tenants, by name; None where callers are not distinguished."""
        return self.callers.limits if isinstance(self.callers, ApiKeys) else None


def access(api_keys: Path | None, shared: Sequence[str] = ()) -> Access:
    """Return the object that identifies callers. Raises ConfigurationError for a file without keys.

    Args:
        api_keys: file of keys and their tenants; None: there is none.
        shared: keys whose holders are not told apart.
    """
    if shared:
        return SharedKeys(shared)
    return OpenAccess() if api_keys is None else ApiKeys.read(api_keys)


def with_template(serving: Serving, tokenizer: Any) -> str:  # noqa: ANN401 - of transformers, or like it
    """Give a tokenizer the chat template that is to be used; return the name of the parser of its calls.

    Raises:
        ConfigurationError: the template cannot be parsed, or a parser's name is unknown.
    """
    if serving.chat_template is not None:
        tokenizer.chat_template = serving.chat_template
        try:
            chat_text(tokenizer, Chat([{"role": "user", "content": "?"}]))
        except RequestError as problem:
            if type(problem.__cause__).__name__ == "TemplateSyntaxError":  # others are of this conversation
                raise ConfigurationError(f"--chat-template cannot be used: {problem.__cause__}") from problem
    require_reasoning_parser(serving.config.reasoning_parser)
    return parser_name(serving.config.tool_parser, tokenizer)


@contextmanager
def applied(
    serving: Serving, replicas: Replicas, *, inspects: bool, has_texts: bool
) -> Iterator[tuple["FastAPI", Service]]:
    """Build an application and its service; replicas run while this is open.

    Args:
        serving: the model and its settings.
        replicas: number of engines, and their routing.
        inspects: whether there is an inspector of blocks; with replicas there is always a page of the replicas.
        has_texts: whether an inspector shows texts.

    Raises:
        ConfigurationError, UnsupportedModelError: the model cannot be loaded or served, or replicas do not start.
        MissingExtraError: there are several replicas, and Ray is not installed.
    """
    inspector: Inspector = "off" if not inspects else "texts" if has_texts else "blocks"
    if replicas.number > 1:
        with _replicated(serving, replicas, inspector) as both:
            yield both
        return
    build = _in_own_process if serving.has_own_process else _in_this_process
    with build(serving, inspector) as both:
        yield both


@contextmanager
def _in_own_process(serving: Serving, inspector: "Inspector") -> Iterator[tuple["FastAPI", Service]]:
    tokenizer = tokenizer_of(serving.model)
    spec = ProcessSpec(
        serving.model,
        serving.dtype,
        serving.engine,
        serving.tenants,
        serving.device,
        serving.draft_model,
        with_template(serving, tokenizer),
        serving.events,
        inspector,
    )
    with ProcessEngine(spec) as engine:
        if engine.built.events is not None:
            _show_endpoints(engine.built.lifetime, engine.built.events)
        service = Service(engine, serving.config, serving.callers, tokenizer=tokenizer)
        app = create_app(service)
        if engine.inspected is not None:
            add_inspected(app, service, engine.inspected)
        yield app, service


@contextmanager
def _in_this_process(serving: Serving, inspector: "Inspector") -> Iterator[tuple["FastAPI", Service]]:
    settings = replace(serving.engine, events=serving.events is not None)
    llm, tokenizer = build_engine(
        serving.model,
        serving.dtype,
        settings,
        serving.tenants,
        draft_model=serving.draft_model,
        device=serving.device,
    )
    with_template(serving, tokenizer)
    local = LocalEngine(llm)
    service = Service(local, serving.config, serving.callers, tokenizer=tokenizer)
    app = create_app(service)
    if inspector != "off":
        add_inspector(app, service, local, has_texts=inspector == "texts")
    with publish_events(service, local, serving.events):
        yield app, service


@contextmanager
def _replicated(serving: Serving, replicas: Replicas, inspector: "Inspector") -> Iterator[tuple["FastAPI", Service]]:
    from pagedkv.cluster import (  # noqa: PLC0415 - an extra of its own
        ClusterSpec,
        ReplicaSpec,
        add_routes,
        deploy,
        shut_down,
    )

    config = serving.config
    tokenizer = tokenizer_of(serving.model)
    replica = ReplicaSpec(
        _resolved(serving.model),
        serving.dtype,
        serving.engine,
        serving.tenants,
        config.max_waiting,
        with_template(serving, tokenizer),
        draft_model=_resolved(serving.draft_model),
        device=serving.device,
        inspector=inspector,
    )
    spec = ClusterSpec(replica, replicas.number, replicas.routing, num_gpus=replicas.num_gpus)
    try:
        cluster = deploy(spec, address=replicas.ray)
        service = Service(cluster, config, serving.callers, tokenizer=tokenizer)
        app = create_app(service)
        add_routes(app, service, cluster)
        yield app, service
    finally:
        shut_down()


def _resolved(model: str | None) -> str | None:
    """Return the whole path of a model's folder, for processes in other folders; a name stays as it is."""
    is_folder = model is not None and Path(model).is_dir()
    return str(Path(str(model)).resolve()) if is_folder else model


@contextmanager
def publish_events(service: Service, engine: LocalEngine, events: EventEndpoints | None) -> Iterator[None]:
    """Publish an engine's KV events, while this is open. Raises ConfigurationError: an endpoint cannot be bound."""
    if events is None:
        yield
        return
    from pagedkv.events import EventPublisher  # noqa: PLC0415 - an extra of its own
    from pagedkv.server.engines import EventsOut  # noqa: PLC0415 - as above

    groups = engine.llm.core.space.config.groups
    with EventPublisher(events.endpoint, events.replay_endpoint, groups=groups, topic=events.topic) as publisher:
        service.on_step.append(EventsOut(engine, publisher).stepped)
        _show_endpoints(
            str(publisher.lifetime), EventEndpoints(publisher.endpoint, publisher.replay_endpoint, events.topic)
        )
        yield


def _show_endpoints(lifetime: str | None, events: EventEndpoints) -> None:
    typer.echo(f"pagedkv: KV events of lifetime {lifetime} are at {events.endpoint}", err=True)
    if events.replay_endpoint is not None:
        typer.echo(f"pagedkv: earlier events and snapshots are at {events.replay_endpoint}", err=True)


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Print the package's warnings and errors to stderr as this command's other lines, while this is open."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("pagedkv: %(message)s"))
    logger = logging.getLogger("pagedkv")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def log_requests(service: Service, path: Path | None, *, writes_tokens: bool) -> Iterator[None]:
    """Write a trace of the served requests, while this is open.

    Raises:
        ConfigurationError: the path is invalid.
        OutputError: the last rows cannot be written.
    """
    if path is None:
        yield
        return
    log = RequestLog(path, service.engine.facts.block_size, writes_tokens=writes_tokens, num_so_far=service.num_so_far)
    service.on_arrived.append(log.arrived)
    service.on_served.append(log.served)
    with _closing(log, "the request log"):
        yield


@contextmanager
def log_steps(service: Service, path: Path | None) -> Iterator[None]:
    """Write the steps of the engine, while this is open.

    Raises:
        ConfigurationError: the path is invalid.
        OutputError: the last steps cannot be written.
    """
    if path is None:
        yield
        return
    log = StepLog(path, service.engine.facts.block_size)
    service.on_step.append(log.stepped)
    with _closing(log, "the step log"):
        yield


@contextmanager
def _closing(log: RequestLog | StepLog, what: str) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            log.close()
        except OSError as problem:
            raise OutputError(f"{what} is not complete: {problem}") from problem
