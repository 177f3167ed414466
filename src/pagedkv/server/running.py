"""Runs the application at one address until it is stopped; requests under way then have time to end."""

import asyncio
import gc
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, final

import uvicorn
from fastapi import FastAPI

from pagedkv.connections import ended_by_signals, uvicorn_config
from pagedkv.errors import ConfigurationError, EngineError
from pagedkv.listening import bound
from pagedkv.server.service import Service

POLL_S: Final = 0.05
NEW_OBJECTS: Final = 20_000
"""New objects, less those freed, after which the youngest are looked through for garbage."""


@contextmanager
def settled() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collections meanwhile: they stay as long as the process serves.

    transformers and torch make half a million. Going over them again for each few hundred requests took a tenth of both
    processes' time, in pauses of 0.1 s. New objects are looked through for each 20,000, and not for each 700: of 256
    requests under way most are alive still, and looking took another tenth of both processes' time.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else some packages report their objects as leaked when the interpreter ends


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


def run(  # noqa: PLR0913 - the address, and what a command knows of it, by keywords
    app: FastAPI,
    service: Service,
    *,
    host: str,
    port: int,
    sockets: list[socket.socket] | None = None,
    encryption: Mapping[str, object] | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once.

    Args:
        app: the application.
        service: what it serves.
        host, port: the address.
        sockets: bound to the address (:func:`pagedkv.listening.bound`), and closed here; None: they are bound here.
        encryption: uvicorn's options of TLS, such as ``ssl_certfile``; None: connections are not encrypted.
        on_started: called once, when the server listens.

    Raises:
        ConfigurationError: the server cannot listen at the address, or its application does not start.
        EngineError: the engine has ended by itself, and ``outlives_engine`` is not set.
    """
    # Texts are encoded one by one: to hand each to a pool of threads takes half as long as to encode it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    bound_sockets = bound(host, port) if sockets is None else sockets
    config = uvicorn_config(app, service.config, service.note_slow, host=host, port=port, **(encryption or {}))
    server = DrainingServer(config, service, on_started)
    try:
        with ended_by_signals(), settled():
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
