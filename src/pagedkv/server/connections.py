"""Connection: ends a client's connection when the client stops sending its request or reading its answer.

::

    connected, or first byte      headers complete        body complete          answer sent
        |---- header_deadline_s ----|-- body_deadline_s --|                          |
                                                          |-- write_deadline_s while the write buffer is full --|

An ASGI application cannot enforce these deadlines: its ``send`` waits without limit while the client does not read, and
it is not called before a header is complete. So this protocol of the event loop enforces them. When it closes a
connection, the application receives a disconnect, and the request ends within a step. Timers run only while a request
is read or the write buffer is full, so a streamed chunk costs nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagedkv.server.config import ServerConfig, SlowCause

__all__ = ["Connection"]

TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@final
class Connection(HttpToolsProtocol):
    """The protocol of one connection.

    Args:
        limits: has the deadlines.
        on_slow: called with the cause when a connection is ended.
        uvicorn: the arguments that uvicorn passes to its protocols.
    """

    def __init__(
        self,
        *,
        limits: ServerConfig,
        on_slow: Callable[[SlowCause], None],
        **uvicorn: Any,  # noqa: ANN401 - as uvicorn has it
    ) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._on_slow = on_slow
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # Requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first header."""
        super().connection_made(transport)
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all timers."""
        self._stop_reading_timer()
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; on an idle connection they begin a header."""
        if self._reading is None and not self._is_answering:
            self._await_header()
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Start the deadline of a header, which may be that of a pipelined request."""
        super().on_message_begin()
        if self._reading is None:
            self._await_header()

    def on_headers_complete(self) -> None:
        """Start the deadline of the body."""
        self._stop_reading_timer()
        self._reading = self.loop.call_later(self._limits.body_deadline_s, self._end_slow_body)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the deadline: the request is complete."""
        self._stop_reading_timer()
        super().on_message_complete()

    # Answers

    def pause_writing(self) -> None:
        """Start the deadline of the client's reading: the write buffer is full."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop that deadline: the buffer has room."""
        self._stop_writing_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Start the deadline of the client's reading, if the connection closes after this response."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; abort one with an unread answer, since closing would wait for the client."""
        if self.transport.get_write_buffer_size():
            self._end_slow_reader()
        else:
            super().timeout_keep_alive_handler()

    # Deadlines

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_header(self) -> None:
        self._reading = self.loop.call_later(self._limits.header_deadline_s, self._end_slow_header)

    def _await_reader(self) -> None:
        self._stop_writing_timer()
        self._writing = self.loop.call_later(self._limits.write_deadline_s, self._end_slow_reader)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _end_slow_header(self) -> None:
        if self._is_answering:  # the header of a pipelined request, while an earlier request is answered
            self._await_header()
        else:
            self._refuse("header")

    def _end_slow_body(self) -> None:
        if self.pipeline:  # reading is paused until the earlier request is answered
            self._reading = self.loop.call_later(self._limits.body_deadline_s, self._end_slow_body)
        else:
            self._refuse("body")

    def _refuse(self, cause: SlowCause) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        self._on_slow(cause)
        if not self._is_answering or not self.cycle.response_started:
            self.transport.write(TOO_SLOW)
        self.transport.close()
        self._await_reader()

    def _end_slow_reader(self) -> None:
        self._writing = None
        self._on_slow("write")
        self.transport.abort()
