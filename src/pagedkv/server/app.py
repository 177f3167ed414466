"""The HTTP application: its paths, their access checks, its error responses, and the OpenAPI document's responses.

The packages of the protocols implement the paths. Every path that takes a key or a body may answer with an
error; :mod:`.http` lists them.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from pagedkv.server.anthropic.bodies import AnthropicError, CountRequest, MessageBody, MessagesRequest, TokenCount
from pagedkv.server.anthropic.messages import Messages
from pagedkv.server.config import Caller
from pagedkv.server.http import (
    COMPONENTS,
    Body,
    BodyLimit,
    add_error_answers,
    documented,
    json_response,
    read_body,
    schemas_of,
)
from pagedkv.server.openai.answers import (
    ChatAnswer,
    ClosedSession,
    CompletionAnswer,
    DeletedResponse,
    Detokenized,
    InputTokens,
    Model,
    ModelList,
    OpenAIError,
    ResponseAnswer,
    Tokenized,
    TokenizerInfo,
    Version,
)
from pagedkv.server.openai.completions import (
    complete_chat,
    complete_chats,
    detokenize,
    model_card,
    models,
    tokenize,
    tokenizer_info,
)
from pagedkv.server.openai.embeddings import EmbeddingsAnswer, EmbeddingsRequest, embed
from pagedkv.server.openai.requests import (
    ChatBatchRequest,
    ChatRequest,
    CloseSessionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from pagedkv.server.openai.responses import Responses
from pagedkv.server.openai.text_completions import complete_text
from pagedkv.server.operators import Asleep, Awake, IsSleeping, Load, ResetCache, ServerInfo, add_operators
from pagedkv.server.service import Service

STORED: Final = "/v1/responses/{response_id}"
ANSWERS: Final[Mapping[str, type]] = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/chat/completions/batch": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/embeddings": EmbeddingsAnswer,
    "/v1/responses": ResponseAnswer,
    "/v1/responses/input_tokens": InputTokens,
    STORED: ResponseAnswer,
    f"{STORED}/cancel": ResponseAnswer,
    "/v1/messages": MessageBody,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/models": ModelList,
    "/v1/models/{name}": Model,
    "/tokenize": Tokenized,
    "/detokenize": Detokenized,
    "/tokenizer_info": TokenizerInfo,
    "/close_session": ClosedSession,
    "/version": Version,
    "/load": Load,
    "/server_info": ServerInfo,
    "/reset_prefix_cache": ResetCache,
    "/sleep": Asleep,
    "/wake_up": Awake,
    "/is_sleeping": IsSleeping,
}
"""JSON answer of each path."""
STREAMING: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Paths that answer with server-sent events where ``stream`` is true."""
OPEN: Final = frozenset({"/version"})
"""JSON paths that need no key and take no input, so that they refuse no request."""
ERRORS: Final[Mapping[int, str]] = {
    400: "The request is invalid, or exceeds the limits of the model or the memory.",
    401: "No API key, or an unknown one.",
    403: "A key without the rights that the request needs.",
    404: "No such model, message or response.",
    413: "The body is larger than the server takes.",
    415: "The body's content type is not JSON.",
    429: "The queue is full.",
    500: "A fault of the server.",
    501: "A package that the request needs is not installed.",
    503: "The engine has stopped, or the server is shutting down.",
    504: "The deadline passed before the answer was complete.",
}
RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}

B = TypeVar("B", bound=Body)
BODIES: Final[list[type[BaseModel]]] = [
    ChatRequest,
    ChatBatchRequest,
    CompletionRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    CloseSessionRequest,
    MessagesRequest,
    CountRequest,
]
TRACE_HEADERS: Final = ("traceparent", "tracestate")


def describe_answers(schema: dict[str, Any]) -> None:
    """Replace the responses that FastAPI assumes by this server's, in an OpenAPI document."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for answer in (*ANSWERS.values(), DeletedResponse, OpenAIError, AnthropicError):
        described = TypeAdapter(answer).json_schema(ref_template=COMPONENTS, mode="serialization")
        schemas.update(described.pop("$defs", {}))
        schemas[answer.__name__] = described
    answers = {path: _responses(path, answer) for path, answer in ANSWERS.items()}
    for path, responses in {**answers, **_plain_responses()}.items():
        for operation in schema["paths"][path].values():
            operation["responses"] = responses
    schema["paths"][STORED]["delete"]["responses"] = _responses(STORED, DeletedResponse)


def _responses(path: str, answer: type) -> dict[str, Any]:
    content = {"application/json": _referring(answer)}
    if path in STREAMING:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if path in OPEN:
        return responses
    error = AnthropicError if path.startswith("/v1/messages") else OpenAIError
    for status, meaning in ERRORS.items():
        responses[str(status)] = {"description": meaning, "content": {"application/json": _referring(error)}}
    responses["429"]["headers"] = RETRY_AFTER
    return responses


def _plain_responses() -> dict[str, dict[str, Any]]:
    """Describe the paths that answer with a status alone, or with text."""
    health = {"200": {"description": "The server can serve."}, "503": {"description": "The server cannot serve."}}
    numbers: dict[str, Any] = {"200": {"description": "Metrics for Prometheus.", "content": {"text/plain": {}}}}
    for status in (401, 403, 500):
        numbers[str(status)] = {"description": ERRORS[status], "content": {"application/json": _referring(OpenAIError)}}
    return {"/health": health, "/ping": health, "/ready": health, "/metrics": numbers}


def _referring(answer: type) -> dict[str, Any]:
    return {"schema": {"$ref": COMPONENTS.format(model=answer.__name__)}}


def create_app(service: Service, *, tracer_provider: object = None) -> FastAPI:
    """Make the application.

    Args:
        service: the service; the application starts and stops it.
        tracer_provider: a provider of OpenTelemetry; each request makes one span. None: no spans.

    Raises:
        MissingExtraError: a provider is given, and OpenTelemetry is not installed.
    """
    if tracer_provider is not None:
        from pagedkv.server.tracing import Tracing  # noqa: PLC0415 - an extra of its own

        service.on_served.append(Tracing(service, cast("Any", tracer_provider)).served)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001 - as FastAPI calls it
        service.start()
        yield
        service.is_draining = True
        await service.stop()

    app = FastAPI(
        title="pagedkv",
        version=version("pagedkv"),
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.root_path = service.config.root_path  # FastAPI warns of the argument
    app.add_middleware(BodyLimit, max_nbytes=service.config.max_body_nbytes)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.config.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    add_error_answers(app, service.note_refused)
    add_operators(app, service, partial(caller_of, service))
    _add_openai(app, service)
    _add_tokens(app, service)
    _add_responses(app, service)
    _add_anthropic(app, service)
    _describe(app)
    return app


def caller_of(service: Service, request: Request) -> Caller:
    """Return the caller of a request. Raises ApiError."""
    caller = service.access.identify(request.headers)
    trace = tuple((name, request.headers[name]) for name in TRACE_HEADERS if name in request.headers)
    return replace(caller, trace=trace) if trace else caller


async def _read_body(service: Service, request: Request, model: type[B]) -> B:
    """Read a body. Raises ApiError; of a strict server for unknown fields too."""
    body = await read_body(request, model)
    service.note_unknown_fields(body)
    return body


async def _read(service: Service, request: Request, model: type[B]) -> B:
    """Read the body of a request for answers. Raises ApiError; for a full queue before the body is parsed."""
    await request.body()
    service.require_place()
    body = await _read_body(service, request, model)
    service.fill_in(body)
    return body


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        caller = caller_of(service, request)
        return await complete_chat(service, await _read(service, request, ChatRequest), caller, request.receive)

    @app.post("/v1/chat/completions/batch", openapi_extra=documented(ChatBatchRequest))
    async def chat_batches(request: Request) -> Response:
        caller = caller_of(service, request)
        return await complete_chats(service, await _read(service, request, ChatBatchRequest), caller, request.receive)

    @app.post("/v1/completions", openapi_extra=documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        caller = caller_of(service, request)
        return await complete_text(service, await _read(service, request, CompletionRequest), caller, request.receive)

    @app.post("/v1/embeddings", openapi_extra=documented(EmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        caller = caller_of(service, request)
        return await embed(service, await _read(service, request, EmbeddingsRequest), caller, request.receive)

    @app.post("/close_session", openapi_extra=documented(CloseSessionRequest))
    async def close_session(request: Request) -> Response:
        caller = caller_of(service, request)
        body = await _read_body(service, request, CloseSessionRequest)
        num_branches, num_blocks = await service.close_session(body.session_id, caller)
        told = {"session_id": body.session_id, "num_branches": num_branches, "num_freed_blocks": num_blocks}
        return json_response(told, headers=body.headers)

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        caller_of(service, request)
        return json_response(models(service))

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        caller_of(service, request)
        service.require_model(name)
        return json_response(model_card(service, name))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=documented(TokenizeRequest))
    async def tokenizing(request: Request) -> Response:
        caller = caller_of(service, request)
        body = await _read_body(service, request, TokenizeRequest)
        answer = await service.run_text_work(body.nbytes, partial(tokenize, service, body, caller))
        return json_response(answer, headers=body.headers)

    @app.post("/detokenize", openapi_extra=documented(DetokenizeRequest))
    async def detokenizing(request: Request) -> Response:
        caller_of(service, request)
        body = await _read_body(service, request, DetokenizeRequest)
        return json_response(detokenize(service, body), headers=body.headers)

    @app.get("/tokenizer_info")
    async def about_tokenizer(request: Request) -> Response:
        caller_of(service, request)
        return json_response(tokenizer_info(service))


def _add_responses(app: FastAPI, service: Service) -> None:
    responses = Responses(service)

    @app.post("/v1/responses", openapi_extra=documented(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        caller = caller_of(service, request)
        return await responses.create(await _read(service, request, ResponsesRequest), caller, request.receive)

    @app.post("/v1/responses/input_tokens", openapi_extra=documented(ResponsesRequest))
    async def count_input(request: Request) -> Response:
        caller = caller_of(service, request)
        body = await _read_body(service, request, ResponsesRequest)
        answer = await service.run_text_work(body.nbytes, partial(responses.count, body, caller))
        return json_response(answer, headers=body.headers)

    @app.get(STORED)
    async def stored_response(request: Request, response_id: str) -> Response:
        return json_response(responses.read(response_id, caller_of(service, request)))

    @app.delete(STORED)
    async def delete_response(request: Request, response_id: str) -> Response:
        return json_response(responses.delete(response_id, caller_of(service, request)))

    @app.post(f"{STORED}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        responses.cancel(response_id, caller_of(service, request))


def _add_anthropic(app: FastAPI, service: Service) -> None:
    messages = Messages(service)

    @app.post("/v1/messages", openapi_extra=documented(MessagesRequest))
    async def create_message(request: Request) -> Response:
        caller = caller_of(service, request)
        return await messages.create(await _read(service, request, MessagesRequest), caller, request.receive)

    @app.post("/v1/messages/count_tokens", openapi_extra=documented(CountRequest))
    async def count_tokens(request: Request) -> Response:
        caller = caller_of(service, request)
        body = await _read_body(service, request, CountRequest)
        answer = await service.run_text_work(body.nbytes, partial(messages.count, body, caller))
        return json_response(answer, headers=body.headers)


def _describe(app: FastAPI) -> None:
    """Add the schemas of all bodies and answers to the application's OpenAPI document."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas_of(BODIES))
            describe_answers(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
