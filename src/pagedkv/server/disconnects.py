"""Work that ends when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

__all__ = ["ClientGoneError", "disconnected", "while_connected"]

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection, so the request needs no answer."""


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run some work; cancel it when the client disconnects.

    Raises:
        ClientGoneError: the client has disconnected; the work has been cancelled, and has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
