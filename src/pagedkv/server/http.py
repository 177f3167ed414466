"""What HTTP brings and gets apart from answers: bodies of requests, and errors in the form of each protocol.

::

    status  OpenAI's type            Anthropic's type        when
    400     invalid_request_error    invalid_request_error   the request is invalid, or exceeds the model or the memory
    401     authentication_error     authentication_error    no API key, or an unknown one
    403     permission_error         permission_error        a key without the rights that the path needs
    404     not_found_error          not_found_error         no such path, model or message
    413     invalid_request_error    request_too_large       the body is larger than the server takes
    415     invalid_request_error    invalid_request_error   the body's content type is not JSON
    429     rate_limit_error         rate_limit_error        the queue is full: Retry-After has the seconds to wait
    405     invalid_request_error    invalid_request_error   no such method of a path
    500     server_error             api_error               a fault of the server
    501     server_error             api_error               a package that the request needs is not installed
    503     server_error             overloaded_error        the engine has stopped, or the server is shutting down
    504     timeout                  timeout_error           the deadline passed before the answer was complete

JSON is written by msgspec: NaN becomes null, since JSON has no NaN. Bodies are bounded in size, read by pydantic, and
have schemas in the server's OpenAPI document; FastAPI would read them with Python's JSON module, which accepts lone
surrogates, which no tokenizer accepts.
"""

import logging
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, final

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel, PrivateAttr, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.errors import (
    ConfigurationError,
    EngineError,
    MissingExtraError,
    PagedKVError,
    QueueFullError,
    RequestError,
    TokenError,
)
from pagedkv.server.fields import UNKNOWN_FIELDS, unknown, unserved

OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout",
}
ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
NOT_RETRIED: Final = frozenset({500, 501, 504})
"""Statuses of requests that would fail again. Official clients retry any status from 500 on, unless a header forbids
it."""
FIRST_SERVER_ERROR: Final = 500
REFUSALS: Final = frozenset({"draining", "sleeping"})
REASONS: Final = {
    400: "invalid",
    401: "no_key",
    403: "not_allowed",
    404: "not_found",
    405: "no_such_method",
    413: "body_too_large",
    415: "not_json",
    422: "invalid",
    429: "queue_full",
}
"""Labels in metrics of errors that have no code of their own."""
LOG: Final = logging.getLogger("pagedkv.server")
CLIENT_GONE: Final = 499
"""Status of a request after its client disconnected; no response is sent."""


class ClientGoneError(Exception):
    """The client has closed its connection, so the request needs no answer."""


class ApiError(Exception):
    """A refused request, or an answer that ended before it was complete.

    Args:
        status: the HTTP status.
        message: a sentence for the client: what was wrong, where, and what to do, without content of other requests.
        param: the invalid field.
        code: a word for programs, such as ``model_not_found``.
        retry_after_s: seconds after which the client may retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def is_refusal(self) -> bool:
        """Whether nothing was computed for the request: it was invalid, not allowed, or the queue was full."""
        return self.status < FIRST_SERVER_ERROR or self.code in REFUSALS

    @property
    def reason(self) -> str:
        """The reason as a word for metrics: the code, else a word for the status."""
        return self.code or REASONS.get(self.status, "other")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**headers, "x-should-retry": "false"} if self.status in NOT_RETRIED else headers

    def as_openai(self) -> dict[str, Any]:
        """Return the response body for OpenAI's clients."""
        kind = OPENAI_TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def as_anthropic(self) -> dict[str, Any]:
        """Return the response body for Anthropic's clients."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def as_api_error(problem: Exception, retry_after_s: int = 1) -> ApiError:
    """Translate an error of the engine.

    Args:
        problem: raised while a request was accepted or served.
        retry_after_s: seconds in the Retry-After header when the queue is full.
    """
    match problem:
        case ApiError():
            return problem
        case QueueFullError():
            return ApiError(429, str(problem), code="queue_full", retry_after_s=retry_after_s)
        case RequestError() | TokenError() | ConfigurationError():
            return ApiError(400, str(problem))
        case MissingExtraError():
            return ApiError(501, str(problem))
        case EngineError():
            return ApiError(503, "the engine has stopped, and the server must be started again", code="engine_ended")
        case _:
            return ApiError(500, "the server failed to serve this request; its log has the reason")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401
    """Answer with JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def add_error_answers(app: FastAPI, note_refused: Callable[[ApiError], None]) -> None:
    """Let an application answer errors as JSON, in the form of the path's protocol.

    Args:
        app: the application.
        note_refused: called with each error that refuses a request.
    """

    def answer(request: Request, problem: ApiError) -> Response:
        if problem.is_refusal:
            note_refused(problem)
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        is_anthropic = path.startswith("/v1/messages")
        body = problem.as_anthropic() if is_anthropic else problem.as_openai()
        return json_response(body, problem.status, problem.headers)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, problem: ApiError) -> Response:
        return answer(request, problem)

    @app.exception_handler(PagedKVError)
    async def engine_error(request: Request, problem: PagedKVError) -> Response:
        return answer(request, as_api_error(problem))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, problem: HTTPException) -> Response:
        return answer(request, ApiError(problem.status_code, str(problem.detail)))

    @app.exception_handler(ClientGoneError)
    @app.exception_handler(ClientDisconnect)  # before its body was read
    async def gone(request: Request, problem: ClientGoneError | ClientDisconnect) -> Response:  # noqa: ARG001 - as FastAPI calls it
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def fault(request: Request, problem: Exception) -> Response:
        LOG.error("%s %s failed", request.method, request.url.path, exc_info=problem)
        return answer(request, ApiError(500, "the server failed to serve this request; its log has the reason"))


def as_sendable(problem: Exception) -> PagedKVError:
    """Return an error that can be pickled: one of ours by itself, any other as an EngineError with its text."""
    if isinstance(problem, PagedKVError) and problem.args and all(isinstance(each, str) for each in problem.args):
        plain = type(problem)
        try:
            return plain(*problem.args)
        except TypeError:  # its constructor takes more than a text
            pass
    return EngineError(f"{type(problem).__name__}: {problem}")


if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
TOO_LARGE: Final = 413
JSON: Final = "application/json"
B = TypeVar("B", bound="Body")
COMPONENTS: Final = "#/components/schemas/{model}"


@final
class BodyLimit:
    """Refuses a body above a limit: by its Content-Length header, or as soon as too many bytes have arrived.

    Args:
        app: serves the requests that are not refused.
        max_nbytes: the largest body, in bytes.
    """

    def __init__(self, app: ASGIApp, max_nbytes: int) -> None:
        self._app = app
        self._max_nbytes = max_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Reading too large a body raises HTTPException, which the app answers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        is_too_large = announced.isdigit() and int(announced) > self._max_nbytes
        num_nbytes = 0

        async def receive_limited() -> Message:
            nonlocal num_nbytes
            if is_too_large:
                raise self._too_large()
            message = await receive()
            num_nbytes += len(message.get("body", b""))
            if num_nbytes > self._max_nbytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(TOO_LARGE, f"the body of the request is larger than {self._max_nbytes:,} bytes")


class Body(BaseModel):
    """A body, or a part of one."""

    _nbytes: int = PrivateAttr(default=0)
    _unknown: tuple[str, ...] = PrivateAttr(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of the body's JSON; 0 for a body that was not read from a request."""
        return self._nbytes

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Unknown fields, the first few."""
        return self._unknown

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: the body's unknown fields."""
        return {UNKNOWN_FIELDS: ", ".join(self._unknown)} if self._unknown else {}

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Read JSON. Raises ValidationError."""
        body = cls.model_validate_json(raw)
        body._nbytes = len(raw)  # noqa: SLF001 - its own class
        body._unknown = unknown(body.model_extra or ())  # noqa: SLF001 - as above
        return body

    def require_known(self) -> None:
        """Refuse a body with unknown fields. Raises ApiError, with the first, and a known one that is like it."""
        for name in self._unknown:
            like = get_close_matches(name, type(self).model_fields, 1)
            meant = f": did you mean {like[0]}?" if like else ""
            raise ApiError(400, f"there is no field {name}{meant}", param=name)


async def read_body(request: Request, model: type[B]) -> B:
    """Read a body, and refuse fields that :mod:`.fields` has as not served.

    Its content type must be JSON: a page of any web site may let a browser post other types, or none, to a server that
    only this machine reaches.

    Raises:
        ApiError: the body is not JSON, or invalid for the path; the message names the first invalid field.
        HTTPException: the body is too large.
    """
    announced = request.headers.get("content-type", "")
    content_type = announced.partition(";")[0].strip().lower()
    if content_type != JSON and not content_type.endswith("+json"):
        raise ApiError(415, f"the header Content-Type must be {JSON}, got {announced[:100]!r}")
    raw = await request.body()
    try:
        body = model.read(raw)
    except ValidationError as problem:
        first = _first_of_note(problem.errors(include_url=False, include_input=False, include_context=False))
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise ApiError(
            400, f"the body of the request is invalid for this path: {message}", param=where or None
        ) from problem
    refused = unserved(body.model_extra or {})
    if refused is not None:
        name, reason = refused
        raise ApiError(400, f"{name} is not served: {reason}", param=name)
    return body


def _first_of_note(errors: Sequence["ErrorDetails"]) -> "ErrorDetails":
    """Return the first error; of a field that takes several types, the one of the type that the client has sent.

    Such a field has an error for each of its types, and those of other types only say that the type is another one.
    """
    of_field = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    return next((error for error in of_field if not error["type"].endswith("_type")), errors[0])


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a path's body, for FastAPI's ``openapi_extra``."""
    schema = {"$ref": COMPONENTS.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def schemas_of(models: list[type[BaseModel]]) -> dict[str, Any]:
    """Return the schemas of bodies and of their parts, by name."""
    schemas: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=COMPONENTS)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return schemas
