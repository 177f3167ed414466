"""ProcessInspected: what the inspector shows of the engine of another process, in the server's process."""

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Literal, final

from pagedkv.errors import EngineError
from pagedkv.server.engine_process.frames import LoopFrames
from pagedkv.server.engine_process.inspection_messages import EndWatcher, NextEvent, Question, Reply
from pagedkv.server.engine_process.messages import ProcessSpec
from pagedkv.server.inspector.inspected import LAST_EVENT

__all__ = ["ProcessInspected", "inspector_link"]

ENDED: Final = "the engine's process has not been started, or has ended"


@final
class ProcessInspected:
    """The data of an engine in another process, as :class:`~pagedkv.server.inspector.Inspected` has them.

    Methods are called in one event loop. After the engine's process has ended, questions raise EngineError, and the
    events of a watcher end.

    Args:
        place: this process's end of the inspector's socket pair.
    """

    def __init__(self, place: socket.socket) -> None:
        self._place = place
        self._frames: LoopFrames | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    def start(self) -> None:
        """Begin to ask, in the running event loop."""
        self._frames = LoopFrames(self._place, self._received, self.end)

    def end(self) -> None:
        """Fail what waits for a reply, in the event loop: there will be none. May be called again."""
        if self._frames is None:
            return
        self._frames.close()
        self._frames = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineError(ENDED))

    def close(self) -> None:
        """Close the socket, after :meth:`end` or where nothing was started."""
        self._place.close()

    # The interface of Inspected

    async def events(self, title: str, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield events, each asked for once the one before it was taken, until ``is_over`` or the engine ends."""
        number = next(self._numbers)
        try:
            while (event := await self._ask(NextEvent(number, title))) != LAST_EVENT:
                yield event
                if is_over():
                    break
        except EngineError:
            pass
        finally:
            if self._frames is not None:
                self._frames.send(EndWatcher(number))
        yield LAST_EVENT

    async def block(self, pool: str, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Describe one block. Raises ApiError, EngineError."""
        return await self._answer("block", pool=pool, block_id=block_id, tenant=tenant)

    async def prefixes(self, pool: str | None) -> dict[str, Any]:
        """Describe the largest cached prefixes. Raises ApiError, EngineError."""
        return await self._answer("prefixes", pool=pool)

    async def history(self, from_s: float, to_s: float) -> dict[str, Any]:
        """Describe a span of time. Raises EngineError."""
        return await self._answer("history", from_s=from_s, to_s=to_s)

    # In the event loop

    async def _answer(self, about: Literal["block", "prefixes", "history"], **arguments: object) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask(Question(next(self._numbers), about, arguments))
        return answer

    async def _ask(self, request: Question | NextEvent) -> Any:  # noqa: ANN401 - an answer, or an event
        """Send a request, and wait for its reply. Raises as the method of an inspector in this process; EngineError."""
        if self._frames is None:
            raise EngineError(ENDED)
        waiting = self._waiting[request.number] = asyncio.get_running_loop().create_future()
        self._frames.send(request)
        try:
            reply = await waiting
        finally:
            del self._waiting[request.number]
        if reply.failure is not None:
            raise reply.failure.as_error()
        return reply.value

    def _received(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.number)
        if waiting is not None and not waiting.done():  # its client has left
            waiting.set_result(reply)


def inspector_link(spec: ProcessSpec) -> tuple[ProcessInspected | None, socket.socket | None]:
    """Make the inspector's socket pair: what asks at one end, and the other end; none where there is no inspector."""
    if spec.inspector == "off":
        return None, None
    ours, others = socket.socketpair()
    return ProcessInspected(ours), others
