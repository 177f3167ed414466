"""BodyLimit: bounds the memory of a request's body."""

from typing import Final, final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BodyLimit"]

TOO_LARGE: Final = 413


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
