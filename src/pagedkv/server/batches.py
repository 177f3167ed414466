"""Batches: requests of OpenAI's batch files, answered by an application without a port.

A line of a batch file is a request, and a line of the results its answer, in the same order::

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {
        "id": "batch_req_...",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "...", "body": {...}},
        "error": null,
    }
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from fastapi import FastAPI

from pagedkv.errors import TraceError
from pagedkv.server.service import new_id

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
REMEDY: Final = (
    'Each line must be {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, its url '
    f"one of {', '.join(URLS)}"
)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a batch file.

    Args:
        custom_id: the client's identity of the request; url: its path; body: its fields.
    """

    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_batch(path: Path) -> list[BatchRequest]:
    """Read a batch file. Raises TraceError, with the line, for one that cannot be read or has no request."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as problem:
        raise TraceError(str(path), None, f"cannot be read: {problem.strerror}", REMEDY) from problem
    requests = [_request(str(path), number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError(str(path), None, "has no request", REMEDY)
    return requests


def _request(path: str, number: int, line: bytes) -> BatchRequest:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as problem:
        raise TraceError(path, number, f"is no JSON ({problem})", REMEDY) from problem
    match row:
        case {"custom_id": str(custom_id), "method": "POST", "url": str(url), "body": dict(body)} if url in URLS:
            if body.get("stream"):
                raise TraceError(
                    path, number, "asks for a stream, and answers of batches are whole", "Leave stream out"
                )
            return BatchRequest(custom_id, url, body)
        case _:
            raise TraceError(path, number, "is no request of a batch", REMEDY)


async def answer_batch(
    app: FastAPI, requests: Iterable[BatchRequest], write: Callable[[bytes], object], *, most_at_once: int
) -> int:
    """Answer requests; write a line of the results for each, in order. Return how many failed.

    Args:
        app: the application, which is started and stopped here.
        requests: the requests.
        write: takes a whole line as soon as those before it are written.
        most_at_once: requests that are under way at once.
    """
    num_failed = 0
    waiting: deque[tuple[BatchRequest, asyncio.Task[httpx.Response]]] = deque()

    async def write_first() -> None:
        nonlocal num_failed
        request, task = waiting.popleft()
        response = await task
        num_failed += response.is_error
        write(_result(request, response))

    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://batch") as client,
    ):
        for request in requests:
            waiting.append((request, asyncio.create_task(client.post(request.url, json=request.body))))
            if len(waiting) >= most_at_once:
                await write_first()
        while waiting:
            await write_first()
    return num_failed


def _result(request: BatchRequest, response: httpx.Response) -> bytes:
    body = response.json()
    whole = {"status_code": response.status_code, "request_id": new_id("req_"), "body": body}
    error = body.get("error") if response.is_error else None
    line = {"id": new_id("batch_req_"), "custom_id": request.custom_id, "response": whole, "error": error}
    return msgspec.json.encode(line) + b"\n"
