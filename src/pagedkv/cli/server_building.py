"""Builds what ``pagedkv serve`` runs: a model, its engine, the service over it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.serving.engine import LLM, EngineConfig
from pagedkv.serving.engine.demo.trained import load_demo
from pagedkv.serving.engine.loading import load
from pagedkv.serving.server import Access, ApiKeys, OpenAccess, RequestLog, ServerConfig, Service

__all__ = ["access", "build", "log_requests"]

PREDICTED_TOKENS: Final = 8
"""Tokens that a step guesses at most from a request's prediction."""


def access(api_keys: Path | None) -> Access:
    """Return what tells callers apart. Raises ConfigurationError for a file that holds no keys."""
    return OpenAccess() if api_keys is None else ApiKeys.read(api_keys)


def build(model: str | None, dtype: str, engine: EngineConfig, config: ServerConfig, callers: Access) -> Service:
    """Build a service.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: of its weights.
        engine: memory and limits; answers end at the longest sequence, as clients expect.
        config: of the server; callers: tells callers apart.

    Raises:
        ConfigurationError, UnsupportedModelError: it cannot be loaded or served.
    """
    loaded, tokenizer = load_demo() if model is None else load(model, dtype)
    if tokenizer is None:
        raise ConfigurationError(f"{model} has no tokenizer that can be loaded, and a server needs one")
    tenants = callers.limits if isinstance(callers, ApiKeys) else None
    engine = replace(engine, beyond_context="clip", leases=True, tenants=tenants, predicted_tokens=PREDICTED_TOKENS)
    llm = LLM(loaded, engine, tokenizer=tokenizer)
    return Service(llm, config, callers, tokenizer=tokenizer)


@contextmanager
def log_requests(service: Service, path: Path | None, *, tells_tokens: bool) -> Iterator[None]:
    """Write a trace of what a service serves, while this is open. Raises ConfigurationError for a path that is none."""
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
