"""Bodies of requests: bounded in size, read by pydantic, with their schemas in the server's OpenAPI document.

FastAPI reads bodies with Python's JSON module, which accepts lone surrogates. No tokenizer accepts them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, final

from pydantic import BaseModel, PrivateAttr, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.server.errors import ApiError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["COMPONENTS", "Body", "BodyLimit", "documented", "read_body", "schemas_of"]

TOO_LARGE: Final = 413

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

    @property
    def nbytes(self) -> int:
        """Bytes of the body's JSON; 0 for a body that was not read from a request."""
        return self._nbytes

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Read JSON. Raises ValidationError."""
        body = cls.model_validate_json(raw)
        body._nbytes = len(raw)  # noqa: SLF001 - its own class
        return body


async def read_body(request: Request, model: type[B]) -> B:
    """Read a body.

    Raises:
        ApiError: the body is not JSON, or invalid for the path; the message names the first invalid field.
        HTTPException: the body is too large.
    """
    raw = await request.body()
    try:
        return model.read(raw)
    except ValidationError as problem:
        first = _first_of_note(problem.errors(include_url=False, include_input=False, include_context=False))
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise ApiError(
            400, f"the body of the request is invalid for this path: {message}", param=where or None
        ) from problem


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
