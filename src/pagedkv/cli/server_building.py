"""Builds the parts of ``pagedkv serve``: a model, its engine, and the service."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import typer

from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.serving.engine import LLM, EngineConfig
from pagedkv.serving.engine.demo.trained import load_demo
from pagedkv.serving.engine.loading import load
from pagedkv.serving.server import Access, ApiKeys, LocalEngine, OpenAccess, RequestLog, Service

__all__ = ["access", "build_engine", "log_requests", "publish_events"]

PREDICTED_TOKENS: Final = 8
"""Most tokens that a step drafts from a request's prediction."""


def access(api_keys: Path | None) -> Access:
    """Return the object that identifies callers. Raises ConfigurationError for a file without keys."""
    return OpenAccess() if api_keys is None else ApiKeys.read(api_keys)


def build_engine(model: str | None, dtype: str, engine: EngineConfig, callers: Access) -> tuple[LLM, Any]:
    """Load a model, and build an engine for a server; return the engine and the model's tokenizer.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: type of its weights.
        engine: memory and limits; answers end at the longest sequence, as clients expect.
        callers: identifies callers; the engine has their tenants.

    Raises:
        ConfigurationError, UnsupportedModelError: the model cannot be loaded or served.
    """
    loaded, tokenizer = load_demo() if model is None else load(model, dtype)
    if tokenizer is None:
        raise ConfigurationError(f"{model} has no tokenizer that can be loaded, and a server needs one")
    tenants = callers.limits if isinstance(callers, ApiKeys) else None
    engine = replace(engine, beyond_context="clip", leases=True, tenants=tenants, predicted_tokens=PREDICTED_TOKENS)
    return LLM(loaded, engine, tokenizer=tokenizer), tokenizer


@contextmanager
def publish_events(
    service: Service, engine: LocalEngine, endpoint: str | None, replay_endpoint: str | None, topic: str
) -> Iterator[None]:
    """Publish the engine's KV events, while this is open. Raises ConfigurationError for endpoints that cannot be bound.

    Args:
        service: has the engine; engine: of this process.
        endpoint: where events are published; None: nowhere.
        replay_endpoint, topic: of the publisher.
    """
    if endpoint is None:
        yield
        return
    from pagedkv.memory.sockets import EventPublisher  # noqa: PLC0415 - an extra of its own
    from pagedkv.serving.server.events_out import EventsOut  # noqa: PLC0415 - as above

    groups = engine.llm.core.space.config.groups
    with EventPublisher(endpoint, replay_endpoint, groups=groups, topic=topic) as publisher:
        service.on_step.append(EventsOut(engine, publisher).stepped)
        typer.echo(f"pagedkv: KV events of lifetime {publisher.lifetime} are at {publisher.endpoint}", err=True)
        if publisher.replay_endpoint is not None:
            typer.echo(f"pagedkv: earlier events and snapshots are at {publisher.replay_endpoint}", err=True)
        yield


@contextmanager
def log_requests(service: Service, path: Path | None, *, tells_tokens: bool) -> Iterator[None]:
    """Write a trace of the served requests, while this is open. Raises ConfigurationError for an invalid path."""
    if path is None:
        yield
        return
    log = RequestLog(path, service.block_size, tells_tokens=tells_tokens, num_so_far=service.num_so_far)
    service.on_arrived.append(log.arrived)
    service.on_served.append(log.served)
    try:
        yield
    finally:
        log.close()
