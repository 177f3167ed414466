"""Runs the application at one address until it is stopped; requests under way then have time to end.

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
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final, Protocol, final

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagedkv.errors import ConfigurationError, EngineError
from pagedkv.listening import bound
from pagedkv.server.config import ServerConfig, SlowCause
from pagedkv.server.service import Service

TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
PIECE_NBYTES: Final = 16 * 2**10
"""Bytes that the parser gets at once: those beyond the bound that it can keep before they are counted."""
MOST_PIPELINED: Final = 16
"""Most requests of a connection that wait for an earlier one's answer; reading pauses at the first, but many of them
fit into what has been read."""

POLL_S: Final = 0.05
KEEP_ALIVE_S: Final = 75
"""Seconds that an idle connection stays open: longer than clients keep it open, so that no client sends a request on a
connection that the server has closed."""


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
        limits: ServerConfig,
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


class Connected(Protocol):
    """What connections need of a service."""

    @property
    def config(self) -> ServerConfig:
        """The limits and deadlines."""
        ...

    def note_slow(self, cause: SlowCause) -> None:
        """Report a connection that was ended because its client was too slow."""
        ...


@final
class DrainingServer(uvicorn.Server):
    """A server that refuses new requests as soon as its shutdown begins, and ends when its engine has ended.

    Args:
        config: of uvicorn.
        service: what is served.
        on_started: called once, when the server listens.

    Attributes:
        has_lost_engine: whether the engine ended by itself, and the server for this reason.
    """

    def __init__(self, config: uvicorn.Config, service: Service, on_started: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._service = service
        self._on_started = on_started
        self.has_lost_engine = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engine, and listen."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """Tell whether the server is to end; called ten times a second."""
        if not self._service.is_alive and not self._service.config.outlives_engine:
            self.has_lost_engine = True
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: wait for requests under way, close idle connections.

        The server listens while it waits, so that those who ask ``/ready`` learn from it that it drains.
        """
        self._service.is_draining = True
        until_s = time.monotonic() + self._service.config.drain_s
        while (  # noqa: ASYNC110 - a second signal sets a flag of uvicorn's, which is no event
            self._service.under_way and not self.force_exit and time.monotonic() < until_s
        ):
            await asyncio.sleep(POLL_S)
        self.config.timeout_graceful_shutdown = max(1, math.ceil(until_s - time.monotonic()))
        await super().shutdown(sockets)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM after the server has drained: uvicorn raises the signal that ended it once more."""
    before = {number: signal.signal(number, _pass) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass(number: int, frame: FrameType | None) -> None:
    """Ignore a signal."""


def uvicorn_config(app: ASGIApp, service: Connected, *, host: str, port: int) -> uvicorn.Config:
    """Return uvicorn's configuration for an application: its limits and deadlines, and uvloop if installed.

    A streamed chunk took 105 us of the event loop with uvloop and httptools, and 167 us with asyncio and h11.
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=partial(Connection, limits=service.config, on_slow=service.note_slow),  # type: ignore[arg-type]
        ws="none",
        log_level="error",  # its warnings are of invalid requests, which any client can send without an end
        access_log=False,
        timeout_graceful_shutdown=math.ceil(service.config.drain_s),
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
    )


def run(  # noqa: PLR0913 - the address, and what a command knows of it, by keywords
    app: FastAPI,
    service: Service,
    *,
    host: str,
    port: int,
    sockets: list[socket.socket] | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once.

    Args:
        app: the application.
        service: what it serves.
        host, port: the address.
        sockets: bound to the address (:func:`pagedkv.listening.bound`), and closed here; None: they are bound here.
        on_started: called once, when the server listens.

    Raises:
        ConfigurationError: the server cannot listen at the address, or its application does not start.
        EngineError: the engine has ended by itself, and ``outlives_engine`` is not set.
    """
    bound_sockets = bound(host, port) if sockets is None else sockets
    server = DrainingServer(uvicorn_config(app, service, host=host, port=port), service, on_started)
    try:
        with _ended_by_signals():
            server.run(bound_sockets)
    except OSError as problem:
        raise ConfigurationError(f"the server cannot listen at {host}:{port}: {problem.strerror}") from problem
    except SystemExit as problem:
        if problem.code:
            raise ConfigurationError("the server does not start: its log has the reason") from None
    finally:
        for each in bound_sockets:
            each.close()
    if server.has_lost_engine:
        raise EngineError("the engine has ended, and the server with it")
