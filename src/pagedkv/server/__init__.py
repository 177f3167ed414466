"""The server: OpenAI's and Anthropic's protocols. Public import path of :mod:`pagedkv.serving.server`."""

from pagedkv.serving.server import (
    Access,
    ApiError,
    ApiKeys,
    Caller,
    LocalEngine,
    OpenAccess,
    RequestLog,
    Served,
    ServedEngine,
    ServerConfig,
    Service,
    add_inspector,
    create_app,
    new_key,
    run,
)

__all__ = [
    "Access",
    "ApiError",
    "ApiKeys",
    "Caller",
    "LocalEngine",
    "OpenAccess",
    "RequestLog",
    "Served",
    "ServedEngine",
    "ServerConfig",
    "Service",
    "add_inspector",
    "create_app",
    "new_key",
    "run",
]
