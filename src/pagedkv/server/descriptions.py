"""The OpenAPI document's responses: what each path answers, by status. :mod:`.bodies` describes the requests.

Every path that takes a key or a body may answer with an error; :mod:`.errors` lists them.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter

from pagedkv.server.anthropic.answer_bodies import AnthropicError, MessageBody, TokenCount
from pagedkv.server.bodies import COMPONENTS
from pagedkv.server.openai.answer_bodies import (
    ChatAnswer,
    CompletionAnswer,
    Detokenized,
    Model,
    ModelList,
    OpenAIError,
    ResponseAnswer,
    Tokenized,
    Version,
)

__all__ = ["describe_answers"]

ANSWERS: Final[Mapping[str, type]] = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/responses": ResponseAnswer,
    "/v1/messages": MessageBody,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/models": ModelList,
    "/v1/models/{name}": Model,
    "/tokenize": Tokenized,
    "/detokenize": Detokenized,
    "/version": Version,
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
    429: "The queue is full.",
    500: "A fault of the server.",
    501: "A package that the request needs is not installed.",
    503: "The engine has stopped, or the server is shutting down.",
    504: "The deadline passed before the answer was complete.",
}
RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}


def describe_answers(schema: dict[str, Any]) -> None:
    """Replace the responses that FastAPI assumes by this server's, in an OpenAPI document."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for answer in (*ANSWERS.values(), OpenAIError, AnthropicError):
        described = TypeAdapter(answer).json_schema(ref_template=COMPONENTS, mode="serialization")
        schemas.update(described.pop("$defs", {}))
        schemas[answer.__name__] = described
    answers = {path: _responses(path, answer) for path, answer in ANSWERS.items()}
    for path, responses in {**answers, **_plain_responses()}.items():
        for operation in schema["paths"][path].values():
            operation["responses"] = responses


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
    return {"/health": health, "/ready": health, "/metrics": numbers}


def _referring(answer: type) -> dict[str, Any]:
    return {"schema": {"$ref": COMPONENTS.format(model=answer.__name__)}}
