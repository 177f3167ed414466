"""Exchange: one request of any protocol, from its arrival to the end of its answer, whole or streamed.

Metrics and logs count each request once. A request whose client has disconnected ends within a step.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Final, TypeVar, final

from starlette.responses import Response
from starlette.types import Receive

from pagedkv.engine import RequestOutput
from pagedkv.server.disconnects import ClientGoneError, while_connected
from pagedkv.server.errors import ApiError
from pagedkv.server.event_stream import EventStream
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest
from pagedkv.server.service import Service

__all__ = ["Exchange"]

T = TypeVar("T")

REPLICA: Final = "x-pagedkv-replica"
REASON: Final = "x-pagedkv-routing"


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
