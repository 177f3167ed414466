"""What the inspector costs, with the engine in a process of its own and in the server's.

Two servers of each kind run side by side, one with an inspector; they serve the same streams in turn, and an idle
server takes no time. Ratios are of turns that follow one another, and medians of several rounds.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import httpx

from benchmarks.server.prompts import draw_prompts
from benchmarks.server.serving import PORT, processor_s, serving
from benchmarks.server.streams import body_of, stream_all

__all__ = ["inspector"]

NUM_BLOCKS: Final = 32_768
LARGE_NUM_BLOCKS: Final = 1_000_000
ROUNDS: Final = 9
NUM_STREAMS: Final = 32
NUM_TOKENS: Final = 192
PLACES: Final[dict[str, tuple[str, ...]]] = {"own_process": (), "one_process": ("--one-process",)}
PATIENCE_S: Final = 600


@dataclass(frozen=True)
class Turn:
    """Streams that were served in one turn.

    Args:
        wall_s: seconds to the last one's end; processor_s: of the server and its engine.
        gap_s: the 99th percentile of the gaps between two chunks; longest_gap_s: the longest of them.
    """

    wall_s: float
    processor_s: float
    gap_s: float
    longest_gap_s: float


def inspector(num: int) -> dict[str, float]:  # noqa: ARG001 - as of all parts
    """Measure a server with an inspector, not watched and watched, relative to one without; and a large pool's gaps."""
    figures: dict[str, float] = {}
    for name, options in PLACES.items():
        figures |= {f"inspector_{name}_{figure}": value for figure, value in _compared(options).items()}
        figures |= {f"inspector_{name}_{figure}": value for figure, value in _of_large_pool(options).items()}
    return figures


def _compared(options: Sequence[str]) -> dict[str, float]:
    requests = _requests()
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        plain, shown = stack.enter_context(_both(options))
        for server in (plain, shown):
            server.serve(requests, is_watched=False)
        for turn in range(ROUNDS):
            turns = {"": plain, "started": shown, "watched": shown}
            order = [*turns][turn % 3 :] + [*turns][: turn % 3]
            results = {each: turns[each].serve(requests, is_watched=each == "watched") for each in order}
            for each in ("started", "watched"):
                found.setdefault(f"{each}_wall", []).append(results[each].wall_s / results[""].wall_s)
                found.setdefault(f"{each}_processor", []).append(results[each].processor_s / results[""].processor_s)
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def _of_large_pool(options: Sequence[str]) -> dict[str, float]:
    """Measure streams' gaps beside a watched pool of a million blocks, whose prefixes are read again and again."""
    requests = _requests()
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        process = stack.enter_context(_large(options))
        process.serve(requests, is_watched=False)
        for turn in range(ROUNDS):
            first = bool(turn % 2)
            results = {
                is_read: process.serve(requests, is_watched=is_read, reads_prefixes=is_read)
                for is_read in (first, not first)
            }
            found.setdefault("million_gap_ratio", []).append(results[True].gap_s / results[False].gap_s)
            found.setdefault("million_longest_gap_ms", []).append(results[True].longest_gap_s * 1e3)
            found.setdefault("million_longest_gap_unwatched_ms", []).append(results[False].longest_gap_s * 1e3)
    return {name: statistics.median(values) for name, values in found.items()}


@dataclass(frozen=True)
class _Server:
    """A server that runs: its process, and its port."""

    process: int
    port: int

    def serve(self, requests: Sequence[bytes], *, is_watched: bool, reads_prefixes: bool = False) -> Turn:
        """Serve streams, and measure them."""
        return asyncio.run(self._serve(requests, is_watched=is_watched, reads_prefixes=reads_prefixes))

    async def _serve(self, requests: Sequence[bytes], *, is_watched: bool, reads_prefixes: bool) -> Turn:
        async with (
            _reading(self.port, "events", is_on=is_watched),
            _reading(self.port, "prefixes", is_on=reads_prefixes),
        ):
            spent_s, begun_s = processor_s(self.process), time.perf_counter()
            responses = await stream_all(self.port, requests, len(requests))
            wall_s = time.perf_counter() - begun_s
            spent_s = processor_s(self.process) - spent_s
        gaps = sorted(gap for each in responses for gap in each.gaps_s)
        return Turn(wall_s, spent_s, gaps[int(0.99 * len(gaps))], gaps[-1])


@contextmanager
def _both(options: Sequence[str]) -> Iterator[tuple[_Server, _Server]]:
    """Run a server without and one with an inspector."""
    common = ("--num-blocks", str(NUM_BLOCKS), "--max-sequences", str(NUM_STREAMS), *options)
    with serving(*common) as plain, serving(*common, "--inspect", port=PORT + 1) as shown:
        yield _Server(plain, PORT), _Server(shown, PORT + 1)


@contextmanager
def _large(options: Sequence[str]) -> Iterator[_Server]:
    common = ("--num-blocks", str(LARGE_NUM_BLOCKS), "--block-size", "1", "--max-sequences", str(NUM_STREAMS))
    with serving(*common, "--inspect", *options) as process:
        yield _Server(process, PORT)


@asynccontextmanager
async def _reading(port: int, path: str, *, is_on: bool) -> AsyncIterator[None]:
    """Read a path of the inspector again and again while this is open; the first bytes have come when it opens."""
    if not is_on:
        yield
        return
    begun = asyncio.Event()

    async def read() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            while True:
                async with client.stream("GET", f"http://127.0.0.1:{port}/inspect/{path}") as answer:
                    assert answer.status_code == httpx.codes.OK, answer.status_code
                    async for _ in answer.aiter_raw():
                        begun.set()

    task = asyncio.ensure_future(read())
    opened = asyncio.ensure_future(begun.wait())
    await asyncio.wait([task, opened], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield
        assert not task.done(), "a reader of the inspector has ended"
    finally:
        task.cancel()
        await asyncio.wait([task])


def _requests() -> list[bytes]:
    return [body_of(prompt, NUM_TOKENS, stream=True) for prompt in draw_prompts(NUM_STREAMS)]
