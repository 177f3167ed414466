"""Connections of clients to a server of HTTP here: bounded in size and time; requests under way have time to end.

A Connection ends when its client stops sending its request or reading its answer.

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
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final, Literal, Protocol, TypeAlias, final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SlowCause: TypeAlias = Literal["header", "body", "write"]
"""What the client did too slowly: sending a header, sending a body, reading an answer."""
CLOSING_S: Final = 1.0
"""Seconds that an idle client has to agree that an encrypted connection is over; event loops wait for 30."""
TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
PIECE_NBYTES: Final = 16 * 2**10
"""Bytes that the parser gets at once: those beyond the bound that it can keep before they are counted."""
MOST_PIPELINED: Final = 16
"""Most requests of a connection that wait for an earlier one's answer; reading pauses at the first, but many of them
fit into what has been read."""
KEEP_ALIVE_S: Final = 75
"""Seconds that an idle connection stays open: longer than clients keep it open, so that no client sends a request on a
connection that the server has closed."""


class ConnectionLimits(Protocol):
    """Bounds of connections, as the settings of a server have them."""

    @property
    def max_header_nbytes(self) -> int:
        """The largest header section of a request, request line included."""
        ...

    @property
    def max_headers(self) -> int:
        """Most headers of a request."""
        ...

    @property
    def header_deadline_s(self) -> float:
        """Seconds in which a client must send a request's header."""
        ...

    @property
    def body_deadline_s(self) -> float:
        """Seconds in which a client must then send the body."""
        ...

    @property
    def write_deadline_s(self) -> float:
        """Seconds in which a client must read a full write buffer."""
        ...

    @property
    def drain_s(self) -> float:
        """Seconds that requests under way have left once the server is stopped."""
        ...


class _TooLargeError(Exception):
    """A header section is larger than allowed, or too many requests wait."""


@final
class Connection(HttpToolsProtocol):
    """The protocol of one connection.

    Args:
        limits: has the deadlines, and the bounds of headers.
        on_slow: called with the cause when a connection is ended.
        uvicorn: the arguments that uvicorn passes to its protocols.
    """

    def __init__(
        self,
        *,
        limits: ConnectionLimits,
        on_slow: Callable[[SlowCause], None],
        **uvicorn: Any,  # noqa: ANN401 - as uvicorn has it
    ) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._on_slow = on_slow
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._num_unparsed = 0
        self._num_headers = 0
        self._is_too_large = False

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
        for begin in range(0, len(data), PIECE_NBYTES):
            if self.transport.is_closing():
                return
            piece = data[begin : begin + PIECE_NBYTES]
            self._num_unparsed += len(piece)
            super().data_received(piece)
            if self._num_unparsed > self._limits.max_header_nbytes and not self.transport.is_closing():
                self._refuse_large()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser did not take: it is invalid, or a callback below has found it too large."""
        if self._is_too_large:
            self._refuse_large()
        else:
            super().send_400_response(msg)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header or a trailer, up to the number allowed. Raises _TooLargeError, which the parser passes on."""
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            self._is_too_large = True
            raise _TooLargeError
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body."""
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        """Start the deadline of a header, which may be that of a pipelined request."""
        if len(self.pipeline) >= MOST_PIPELINED:
            self._is_too_large = True
            raise _TooLargeError
        self._num_headers = 0
        super().on_message_begin()
        if self._reading is None:
            self._await_header()

    def on_headers_complete(self) -> None:
        """Start the deadline of the body."""
        self._num_unparsed = 0
        self._stop_reading_timer()
        self._reading = self.loop.call_later(self._limits.body_deadline_s, self._end_slow_body)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the deadline: the request is complete."""
        self._num_unparsed = 0
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

    def shutdown(self) -> None:
        """Close an idle connection, in a second at most: under TLS closing waits for a client, which may be silent."""
        super().shutdown()
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.loop.call_later(CLOSING_S, self.transport.abort)

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

    def _refuse_large(self) -> None:
        """End the connection; an answer under way is cut, since what the client sends behind it is not trusted."""
        self._stop_reading_timer()
        if not self._is_answering:
            self.transport.write(TOO_LARGE)
        self.transport.close()
        self._await_reader()

    def _end_slow_reader(self) -> None:
        self._writing = None
        self._on_slow("write")
        self.transport.abort()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM after a server has drained: uvicorn raises the signal that ended it once more."""
    before = {number: signal.signal(number, _pass) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass(number: int, frame: FrameType | None) -> None:
    """Ignore a signal."""


def uvicorn_config(
    app: ASGIApp,
    limits: ConnectionLimits,
    on_slow: Callable[[SlowCause], None],
    **options: Any,  # noqa: ANN401 - uvicorn's own
) -> uvicorn.Config:
    """Return uvicorn's configuration for an application: its limits and deadlines, and uvloop if installed.

    A streamed chunk took 105 us of the event loop with uvloop and httptools, and 167 us with asyncio and h11.

    Args:
        app: the application; limits: of its connections.
        on_slow: called with the cause when a connection is ended because its client was too slow.
        options: of uvicorn, such as the address.
    """
    return uvicorn.Config(
        app,
        http=partial(Connection, limits=limits, on_slow=on_slow),  # type: ignore[arg-type]
        ws="none",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(limits.drain_s),
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
        **{"log_level": "error"} | options,  # its warnings are of invalid requests, which any client can send
    )
