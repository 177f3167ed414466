"""Exchange: one request of any protocol, from its arrival to the end of its answer, whole or streamed.

Metrics and logs count each request once. A request whose client has disconnected ends within a step.

An EventStream sends server-sent events to one client as they are made. A slow client delays only its own events: its
stream waits until it reads, and the tokens that arrive meanwhile are sent together.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar, final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedkv.engine import RequestOutput
from pagedkv.server.errors import ApiError, ClientGoneError
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest
from pagedkv.server.service import Service

__all__ = ["DONE", "EventStream", "Exchange", "disconnected", "event", "while_connected"]

T = TypeVar("T")

DONE: Final = b"data: [DONE]\n\n"
"""Last event of the streams of OpenAI's chat and text completions."""
REPLICA: Final = "x-pagedkv-replica"
REASON: Final = "x-pagedkv-routing"


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


@final
class Exchange:
    """Serves one request.

    Args:
        service: the engine and what all protocols share.
        request: the request for the engine.
        receive: ``receive`` of the connection, after the body was read.
    """

    def __init__(self, service: Service, request: GenerationRequest, receive: Receive) -> None:
        self._service = service
        self._request = request
        self._receive = receive
        self._arrived_s = service.wall_clock()
        self._is_noted = False
        self.headers: dict[str, str] = {}
        """Headers of the response, once the engine has accepted the request."""

    async def whole(self, answer: Callable[[Generation, Sequence[AnswerEvent]], T]) -> T:
        """Wait for all answers, and make the response from them.

        Args:
            answer: makes the response from the ended generation and one event for each answer.

        Raises:
            ApiError: the request cannot be served, or its answer ended before it was complete.
            ClientGoneError: the client has disconnected.
        """
        self._service.note_arrived(self._request)
        return await while_connected(self._receive, self._whole(answer))

    async def _whole(self, answer: Callable[[Generation, Sequence[AnswerEvent]], T]) -> T:
        generation: Generation | None = None
        try:
            generation = await self._begin()
            response = answer(generation, await generation.finished())
        except asyncio.CancelledError:
            self._note(generation, None)
            raise
        except Exception as problem:
            error = self._service.as_api_error(problem)
            self._note(generation, error)
            raise error from problem
        self._note(generation, None)
        return response

    async def streamed(
        self,
        chunks: Callable[[Generation], AsyncGenerator[bytes, None]],
        failed: Callable[[ApiError], bytes],
    ) -> Response:
        """Answer with events.

        Args:
            chunks: yields the events of a generation under way.
            failed: writes the event that reports a failure in the middle of a stream.

        Raises:
            ApiError: the request cannot be served.
            ClientGoneError: the client has disconnected.
        """
        self._service.note_arrived(self._request)
        try:
            generation = await while_connected(self._receive, self._begin())
        except (ClientGoneError, asyncio.CancelledError):
            self._note(None, None)
            raise
        except Exception as problem:
            error = self._service.as_api_error(problem)
            self._note(None, error)
            raise error from problem

        async def end() -> None:  # also called for a stream that ended before its first event
            await generation.aclose()
            self._note(generation, None)

        return EventStream(self._guarded(generation, chunks, failed), end, self.headers)

    async def _guarded(
        self,
        generation: Generation,
        chunks: Callable[[Generation], AsyncGenerator[bytes, None]],
        failed: Callable[[ApiError], bytes],
    ) -> AsyncGenerator[bytes, None]:
        problem: ApiError | None = None
        events = chunks(generation)
        try:
            async for each in events:
                yield each
        except Exception as error:  # noqa: BLE001 - the stream has begun, so any error is reported in it
            problem = self._service.as_api_error(error)
            yield failed(problem)
        finally:
            await events.aclose()
            self._note(generation, problem)

    async def _begin(self) -> Generation:
        generation = await self._service.begin(self._request)
        self._service.under_way[self._request] = generation
        routes = self._service.routes(generation)
        if routes:
            self.headers[REPLICA] = ", ".join(dict.fromkeys(route.replica for route in routes))
            self.headers[REASON] = "; ".join(dict.fromkeys(route.reason for route in routes))
        return generation

    def _note(self, generation: Generation | None, problem: ApiError | None) -> None:
        """Report the request to metrics and logs, once. An aborted one is reported when the engine has ended it."""
        if self._is_noted:
            return
        self._is_noted = True
        has_left = problem is None and (generation is None or not generation.outputs)
        routes = [] if generation is None else self._service.routes(generation)
        end = partial(
            self._service.note_served, self._request, self._arrived_s, problem=problem, has_left=has_left, routes=routes
        )
        if generation is None:
            end(())
        elif generation.is_over:
            end(generation.results)
        else:
            self._service.note_later(self._note_when_over(generation, end))

    @staticmethod
    async def _note_when_over(generation: Generation, end: Callable[[Sequence[RequestOutput]], None]) -> None:
        await generation.over()
        end(generation.results)
