"""The inspector over two processes: it questions the engine's process through a socket pair of its own.

The server's process sends requests (ProcessInspected), and the engine's process one reply to each (InspectionChild). A
watcher's events are requested one by one, so at most one event of a client that does not read is on the way.

The child has a thread with an event loop. Questions wait there for the time between two steps, and answers are written
there: the engine's thread copies what is asked for, and goes on. Answers have a socket of their own, so none is sent
before tokens.
"""

import asyncio
import itertools
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, assert_never, final

from pagedkv.errors import EngineError
from pagedkv.server.engine_process.messages import LoopFrames, ProcessSpec
from pagedkv.server.http import ApiError, as_sendable
from pagedkv.server.inspector.inspected import LAST_EVENT, Inspected

ENDED: Final = "the engine's process has not been started, or has ended"


@dataclass(frozen=True, slots=True)
class Question:
    """Answer a question.

    Args:
        number: identifies its reply; no other question or watcher has it.
        about: the method of :class:`~pagedkv.server.inspector.Inspected` that answers.
        arguments: of the method, by name.
    """

    number: int
    about: Literal["block", "prefixes", "history"]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NextEvent:
    """Send a watcher's next event, once there is one. The first of a number begins the watcher.

    Args:
        number: identifies the watcher and its replies.
        title: of its page.
    """

    number: int
    title: str


@dataclass(frozen=True, slots=True)
class EndWatcher:
    """End a watcher; no reply. Without effect where there is none of this number."""

    number: int


Request: TypeAlias = Question | NextEvent | EndWatcher


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer.

    Args:
        status: of HTTP; None: the engine has ended, or it is a fault.
        message: the reason, for the client, or for the server's log.
        is_fault: whether it is a fault of the inspector.
    """

    status: int | None
    message: str
    is_fault: bool = False

    def as_error(self) -> Exception:
        """Return the error that an inspector in the server's process would raise."""
        if self.status is not None:
            return ApiError(self.status, self.message)
        return RuntimeError(self.message) if self.is_fault else EngineError(self.message)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a question, or a watcher's event.

    Args:
        number: of the question or the watcher.
        value: the answer; None where it failed.
        failure: why there is none; None where there is one.
    """

    number: int
    value: Any = None
    failure: Failure | None = None


def failure_of(problem: Exception) -> Failure:
    """Turn an error into a value that crosses to the other process."""
    match problem:
        case ApiError():
            return Failure(problem.status, problem.message)
        case EngineError():
            return Failure(None, str(problem))
        case _:
            return Failure(None, f"the inspector failed in the engine's process: {as_sendable(problem)}", is_fault=True)


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
