"""InspectionChild: answers the inspector's questions in the engine's process.

It has a thread with an event loop. Questions wait there for the time between two steps, and answers are written there:
the engine's thread copies what is asked for, and goes on. Answers have a socket of their own, so none is sent before
tokens.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import suppress
from typing import Any, assert_never, final

from pagedkv.server.engine_process.frames import LoopFrames
from pagedkv.server.engine_process.inspection_messages import (
    EndWatcher,
    NextEvent,
    Question,
    Reply,
    Request,
    failure_of,
)
from pagedkv.server.inspector.inspected import LAST_EVENT, Inspected

__all__ = ["InspectionChild"]


@final
class InspectionChild:
    """Answers the server's process, from :meth:`start` to :meth:`close`. Requests that come before wait in the socket.

    Args:
        inspected: the data of the engine.
        place: this process's end of the inspector's socket pair; closed at the end.
    """

    def __init__(self, inspected: Inspected, place: socket.socket) -> None:
        self._inspected = inspected
        self._place = place
        self._watchers: dict[int, _Watcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="pagedkv inspector", daemon=True)

    def start(self) -> None:
        """Begin to answer. The engine was started."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started. What waits for the engine is dropped."""
        with suppress(OSError):  # the server's process has ended it before
            self._place.shutdown(socket.SHUT_RD)
        if self._thread.ident is not None:
            self._thread.join()

    # In the thread

    def _run(self) -> None:
        asyncio.run(self._answer_all())

    async def _answer_all(self) -> None:
        ended = asyncio.Event()
        self._frames = LoopFrames(self._place, self._received, ended.set)
        try:
            await ended.wait()
        finally:
            self._frames.close()

    def _received(self, request: Request) -> None:
        match request:
            case Question():
                method = getattr(self._inspected, request.about)
                self._begin(self._reply(request.number, method(**request.arguments)))
            case NextEvent():
                watcher = self._watchers.get(request.number)
                if watcher is None:
                    events = self._inspected.events(request.title, is_over=lambda: False)
                    watcher = self._watchers[request.number] = _Watcher(events)
                watcher.pulling = self._begin(self._reply(request.number, anext(watcher.events, LAST_EVENT)))
            case EndWatcher():
                watcher = self._watchers.pop(request.number, None)
                if watcher is not None:
                    self._begin(watcher.end())
            case _:
                assert_never(request)

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run work in a task, which the event loop alone would not keep."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reply(self, number: int, work: Awaitable[Any]) -> None:
        try:
            reply = Reply(number, await work)
        except Exception as problem:  # noqa: BLE001 - sent to the server's process, which raises it for this request
            reply = Reply(number, failure=failure_of(problem))
        self._frames.send(reply)


@final
class _Watcher:
    """The events of one watcher.

    Args:
        events: yields them.

    Attributes:
        pulling: the task of the last event that was asked for.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.events = events
        self.pulling: asyncio.Task[None] | None = None

    async def end(self) -> None:
        """Stop waiting for an event, and close the generator."""
        if self.pulling is not None:
            self.pulling.cancel()
            await asyncio.wait([self.pulling])
        await self.events.aclose()
