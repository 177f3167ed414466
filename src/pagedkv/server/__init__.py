"""The server: OpenAI's and Anthropic's protocols over one engine.

::

    app                      paths, errors, access checks
    operators                paths for those who run it: health, metrics, the cache
    openai | anthropic       protocols: what clients send and get
    service                  what all protocols share, before an engine; one request from arrival to its answer's end
    engines                  what a service needs of an engine, an engine of this process, its KV events
    engine_process           an engine in a process of its own (the command's default)
    generation               answers under way: tokens to text, reasoning, calls
    chat_prompts             conversations to tokens, so that a conversation's next turn hits
    parsing | grammars       finds reasoning and calls in answers | constrains answers to a format
    inspector                a page that shows blocks, requests and misses (``--inspect``)
    batches                  the application without a port: OpenAI's batch files
    running                  the application at an address, with deadlines of clients that stop sending or reading
    metrics, request_log, tracing   what operators see
    http, config             bodies and errors | settings, and who may ask
"""

from pagedkv.contract.extras import needing

with needing("server", "pagedkv.server"):
    import fastapi  # noqa: F401 - imported first, so that a missing package raises our MissingExtraError
    import httptools  # noqa: F401 - as fastapi
    import msgspec  # noqa: F401 - as fastapi
    import prometheus_client  # noqa: F401 - as fastapi
    import uvicorn  # noqa: F401 - as fastapi

from pagedkv.api_keys import new_key
from pagedkv.server.app import create_app
from pagedkv.server.config import Access, ApiKeys, Caller, OpenAccess, ServerConfig, SharedKeys
from pagedkv.server.engine_process import EventEndpoints, ProcessEngine, ProcessSpec
from pagedkv.server.engines import EngineFacts, LocalEngine, Route, ServedEngine
from pagedkv.server.http import ApiError
from pagedkv.server.inspector import add_inspected, add_inspector
from pagedkv.server.request_log import RequestLog, StepLog
from pagedkv.server.running import run
from pagedkv.server.service import Served, Service

__all__ = [
    "Access",
    "ApiError",
    "ApiKeys",
    "Caller",
    "EngineFacts",
    "EventEndpoints",
    "LocalEngine",
    "OpenAccess",
    "ProcessEngine",
    "ProcessSpec",
    "RequestLog",
    "Route",
    "Served",
    "ServedEngine",
    "ServerConfig",
    "Service",
    "SharedKeys",
    "StepLog",
    "add_inspected",
    "add_inspector",
    "create_app",
    "new_key",
    "run",
]
