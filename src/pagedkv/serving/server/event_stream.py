"""EventStream: server-sent events to one client, as they are made, until the end or until the client goes.

A slow client holds up its own events alone: sending waits for it, and meanwhile its answer's tokens gather and are sent
together.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Final, final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedkv.serving.server.disconnects import ClientGoneError, while_connected

__all__ = ["DONE", "EventStream", "event"]

DONE: Final = b"data: [DONE]\n\n"
"""What ends the streams of OpenAI's chat and text completions."""


def event(data: bytes, name: str | None = None) -> bytes:
    """Write one event.

    Args:
        data: JSON in one line.
        name: the event's, where the protocol gives events names.
    """
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@final
class EventStream(Response):
    """An answer of events.

    Args:
        events: gives them, each whole; closed when the client goes.
        end: called when nothing more is sent, whether or not the first event was asked for.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[], Coroutine[Any, Any, None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as Response has it
        """Send all events; a client that goes ends it quietly."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            await asyncio.shield(self._close())

    async def _close(self) -> None:
        await self._events.aclose()
        await self._end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
