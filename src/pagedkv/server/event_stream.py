"""EventStream: sends server-sent events to one client as they are made, until the end or a disconnect.

A slow client delays only its own events: its stream waits until it reads, and the tokens that arrive meanwhile are sent
together.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Final, final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedkv.server.disconnects import ClientGoneError, while_connected

__all__ = ["DONE", "EventStream", "event"]

DONE: Final = b"data: [DONE]\n\n"
"""Last event of the streams of OpenAI's chat and text completions."""


def event(data: bytes, name: str | None = None) -> bytes:
    """Write one event.

    Args:
        data: JSON in one line.
        name: name of the event, in protocols whose events have names.
    """
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@final
class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: yields whole events; closed when the client disconnects.
        end: called once nothing more is sent, even if no event was sent.
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
        """Send all events; a disconnect ends it without an error."""
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
