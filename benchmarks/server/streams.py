"""Streams: a client of one request a connection, with little processor time of its own."""

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["PATH", "StreamedResponse", "body_of", "stream", "stream_all", "whole_all"]

PATH: Final = "/v1/chat/completions"
END: Final = b"0\r\n\r\n"
HEAD_END: Final = b"\r\n\r\n"
OK: Final = b"HTTP/1.1 200"
SLOW_NBYTES: Final = 512
SLOW_S: Final = 0.05


@dataclass(slots=True)
class StreamedResponse:
    """A streamed response, as its client received it.

    Args:
        asked_s: when it was sent; times_s: when chunks with text came; num_chunks: events, the last one left out.
        is_answered: whether the status was 200.
    """

    asked_s: float
    times_s: list[float] = field(default_factory=list)
    num_chunks: int = 0
    is_answered: bool = False

    @property
    def first_s(self) -> float:
        """Seconds to the first chunk."""
        return self.times_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between chunks."""
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]


def body_of(prompt: str, max_tokens: int, **more: Any) -> bytes:  # noqa: ANN401 - JSON
    """Write a request."""
    wish = {"model": "demo", "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    body = json.dumps({**wish, "temperature": 0, "ignore_eos": True, **more}).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def stream(
    port: int, request: bytes, *, is_slow: bool = False, response: StreamedResponse | None = None
) -> StreamedResponse:
    """Send a request on a connection of its own, and read its stream; slowly: by 512 bytes, into a small buffer.

    ``response`` is filled and returned; None: a new one.
    """
    place = socket.socket()
    if is_slow:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    place.setblocking(False)  # noqa: FBT003 - as socket has it
    await asyncio.get_running_loop().sock_connect(place, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=place, limit=SLOW_NBYTES if is_slow else 2**16)
    response = StreamedResponse(0.0) if response is None else response
    response.asked_s = time.perf_counter()
    writer.write(request)
    tail = b""
    try:
        while piece := await reader.read(SLOW_NBYTES if is_slow else 2**16):
            response.is_answered |= piece.startswith(OK)
            events = piece.count(b"data: {")
            if events:
                response.times_s.append(time.perf_counter())
                response.num_chunks += events
            tail = (tail + piece)[-len(END) :]
            if tail == END or not response.is_answered:
                break
            if is_slow:
                await asyncio.sleep(SLOW_S)
    finally:
        writer.close()
    return response


async def stream_all(port: int, requests: Sequence[bytes], num_connections: int) -> list[StreamedResponse]:
    """Read the streams of all requests, so many at a time."""
    queue, responses = list(requests), []

    async def work() -> None:
        while queue:
            responses.append(await stream(port, queue.pop()))

    await asyncio.gather(*(work() for _ in range(num_connections)))
    assert all(each.is_answered for each in responses), "a stream was refused"
    return responses


async def whole_all(port: int, requests: Sequence[bytes], num_connections: int) -> int:
    """Read the answers of all requests, by so many connections that stay open; return their bytes."""
    queue = list(requests)

    async def work() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        nbytes = 0
        while queue:
            writer.write(queue.pop())
            head = await reader.readuntil(HEAD_END)
            assert head.startswith(OK), head
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            nbytes += len(await reader.readexactly(length))
        writer.close()
        return nbytes

    return sum(await asyncio.gather(*(work() for _ in range(num_connections))))
