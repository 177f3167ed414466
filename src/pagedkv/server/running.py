"""Runs the application at one address until it is stopped; requests under way then have time to end."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Final, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from pagedkv.errors import ConfigurationError
from pagedkv.server.config import ServerConfig, SlowCause
from pagedkv.server.connections import Connection
from pagedkv.server.service import Service

__all__ = ["Connected", "run", "uvicorn_config"]

KEEP_ALIVE_S: Final = 75
"""Seconds that an idle connection stays open: longer than clients keep it open, so that no client sends a request on a
connection that the server has closed."""


class Connected(Protocol):
    """What connections need of a service."""

    @property
    def config(self) -> ServerConfig:
        """The limits and deadlines."""
        ...

    def note_slow(self, cause: SlowCause) -> None:
        """Report a connection that was ended because its client was too slow."""
        ...


class _Server(uvicorn.Server):
    """A server that refuses new requests as soon as its shutdown begins."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]
        """Drain: wait for requests under way, close idle connections."""
        self._service.is_draining = True
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
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(service.config.drain_s),
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
    )


def run(app: FastAPI, service: Service, *, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once.

    Raises:
        ConfigurationError: the server cannot listen at the address.
    """
    server = _Server(uvicorn_config(app, service, host=host, port=port), service)
    try:
        with _ended_by_signals():
            server.run()
    except SystemExit as problem:
        if problem.code:
            raise ConfigurationError(f"the server cannot listen at {host}:{port}: is the port in use?") from None
