"""Error answers: what a client of an application gets for each kind of error."""

import logging
from collections.abc import Callable
from typing import Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pagedkv.errors import PagedKVError
from pagedkv.server.disconnects import ClientGoneError
from pagedkv.server.errors import ApiError, as_api_error
from pagedkv.server.json_response import json_response

__all__ = ["add_error_answers"]

LOG: Final = logging.getLogger("pagedkv.server")

CLIENT_GONE: Final = 499
"""Status of a request after its client disconnected; no response is sent."""


def add_error_answers(app: FastAPI, note_refused: Callable[[ApiError], None]) -> None:
    """Let an application answer errors as JSON, in the form of the path's protocol.

    Args:
        app: the application.
        note_refused: called with each error that refuses a request.
    """

    def answer(request: Request, problem: ApiError) -> Response:
        if problem.is_refusal:
            note_refused(problem)
        is_anthropic = request.url.path.startswith("/v1/messages")
        body = problem.as_anthropic() if is_anthropic else problem.as_openai()
        return json_response(body, problem.status, problem.headers)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, problem: ApiError) -> Response:
        return answer(request, problem)

    @app.exception_handler(PagedKVError)
    async def engine_error(request: Request, problem: PagedKVError) -> Response:
        return answer(request, as_api_error(problem))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, problem: HTTPException) -> Response:
        return answer(request, ApiError(problem.status_code, str(problem.detail)))

    @app.exception_handler(ClientGoneError)
    @app.exception_handler(ClientDisconnect)  # before its body was read
    async def gone(request: Request, problem: ClientGoneError | ClientDisconnect) -> Response:  # noqa: ARG001 - as FastAPI calls it
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def fault(request: Request, problem: Exception) -> Response:
        LOG.error("%s %s failed", request.method, request.url.path, exc_info=problem)
        return answer(request, ApiError(500, "the server failed to serve this request; its log has the reason"))
