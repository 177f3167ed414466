"""Parts of the benchmark: what HTTP costs, how many tokens streams get, slow readers, goodput under overload.

Each part returns numbers by name. Ratios are of runs that take turns, and medians of several turns, since other work on
the machine moves every time alike.
"""

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from benchmarks.server.inspecting import inspector
from benchmarks.server.prompts import NUM_BLOCKS, draw_prompts, engine_for
from benchmarks.server.serving import PORT, loop_s, processor_s, serving
from benchmarks.server.streams import StreamedResponse, body_of, stream, stream_all, whole_all
from benchmarks.server.through_http import tokens
from pagedkv.engine import LLM, AsyncLLM, SamplingParams

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

__all__ = ["PARTS"]

FIRST_BOUND: Final = 20
FURTHER_BOUND: Final = 5
"""A request is good if its first chunk comes within 20 times, and its further ones on average within 5 times, the
median of a server with one request at a time."""
OVERLOADS: Final = (0.5, 1.0, 2.0, 5.0)


def costs(num: int) -> dict[str, float]:
    """Measure the event loop's processor time per request and per chunk, beyond AsyncLLM's for the same work."""
    num_tokens, num_connections = 16, 50
    prompts = draw_prompts(num)
    chats, llm = engine_for(prompts, 64)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    figures: dict[str, list[float]] = {"ms_a_request": [], "us_a_chunk": [], "process_ms_a_request": []}
    with serving("--num-blocks", str(NUM_BLOCKS), "--max-sequences", "64") as process:
        asyncio.run(stream_all(PORT, [body_of(prompt, 4, stream=True) for prompt in prompts[:50]], num_connections))
        for _ in range(3):
            loop, whole_process = _in_process(llm, chats, params, num_connections)
            before, spent = loop_s(process), processor_s(process)
            asyncio.run(whole_all(PORT, [body_of(each, num_tokens) for each in prompts], num_connections))
            whole, process_s = loop_s(process) - before, processor_s(process) - spent
            before = loop_s(process)
            streams = asyncio.run(
                stream_all(PORT, [body_of(each, num_tokens, stream=True) for each in prompts], num_connections)
            )
            streamed = loop_s(process) - before
            figures["ms_a_request"].append((whole - loop) / num * 1e3)
            figures["us_a_chunk"].append((streamed - whole) / sum(each.num_chunks for each in streams) * 1e6)
            figures["process_ms_a_request"].append((process_s - whole_process) / num * 1e3)
    return {f"http_{name}": statistics.median(values) for name, values in figures.items()}


def slow(num: int) -> dict[str, float]:
    """Measure the 99th percentile of 32 streams' gaps beside 200 slow readers, against 200 that read at once.

    The readers have a process of their own, so that what they cost delays no other client, and have all begun.
    """
    num_others, num_slow = 32, 200
    prompts = draw_prompts(max(num, num_others + num_slow))
    requests = [body_of(prompt, 64, stream=True) for prompt in prompts[:num_others]]
    background = [body_of(prompt, 256, stream=True) for prompt in prompts[num_others:][:num_slow]]

    def gaps(*, is_slow: bool) -> float:
        with _readers(background, is_slow=is_slow):
            responses = asyncio.run(stream_all(PORT, requests, num_others))
        return _percentile([gap for each in responses for gap in each.gaps_s], 0.99)

    options = ("--num-blocks", str(NUM_BLOCKS), "--max-sequences", "256", "--max-waiting", "1024")
    ratios = []
    with serving(*options):
        gaps(is_slow=False)
        for turn in range(5):
            first = bool(turn % 2)
            found = {is_slow: gaps(is_slow=is_slow) for is_slow in (first, not first)}
            ratios.append(found[True] / found[False])
    return {"slow_readers_gap_ratio": statistics.median(ratios)}


def goodput(num: int) -> dict[str, float]:
    """Measure good requests a second at several loads, and at 5 times capacity as a share of the best."""
    num_tokens = 16
    requests = [body_of(prompt, num_tokens, stream=True) for prompt in draw_prompts(max(num, 200))]
    with serving("--num-blocks", str(NUM_BLOCKS), "--max-sequences", "16", "--max-waiting", "16"):
        asyncio.run(stream_all(PORT, requests[:40], 8))
        alone = asyncio.run(stream_all(PORT, requests[:10], 1))
        first_s = FIRST_BOUND * statistics.median(each.first_s for each in alone)
        further_s = FURTHER_BOUND * statistics.median(gap for each in alone for gap in each.gaps_s)

        def is_good(each: StreamedResponse) -> bool:
            if not each.is_answered or not each.times_s:
                return False
            gaps = each.gaps_s
            return each.first_s <= first_s and (not gaps or statistics.fmean(gaps) <= further_s)

        begun = time.perf_counter()
        asyncio.run(stream_all(PORT, requests[:150], 16))
        capacity = 150 / (time.perf_counter() - begun)
        rates = {
            load: statistics.median(asyncio.run(_offered(requests, load * capacity, is_good)) for _ in range(2))
            for load in OVERLOADS
        }
    return {
        "capacity_requests_a_second": capacity,
        "bound_first_ms": first_s * 1e3,
        "bound_further_ms": further_s * 1e3,
        **{f"goodput_at_{load}": rate for load, rate in rates.items()},
        "goodput_share_at_5": rates[5.0] / max(rates.values()),
    }


PARTS: Final[dict[str, Callable[[int], dict[str, float]]]] = {
    "costs": costs,
    "tokens": tokens,
    "slow": slow,
    "goodput": goodput,
    "inspector": inspector,
}


@contextmanager
def _readers(requests: Sequence[bytes], *, is_slow: bool) -> Iterator[None]:
    """Read streams in another process, from when all have begun while this is open, and until all have ended."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    process = context.Process(target=_read, args=(requests, is_slow, begun))
    process.start()
    begun.wait()
    yield
    process.join()
    assert process.exitcode == 0, "a reader has failed"


def _read(requests: Sequence[bytes], is_slow: bool, begun: "Event") -> None:  # noqa: FBT001 - as Process passes it
    async def read() -> None:
        responses = [StreamedResponse(0.0) for _ in requests]
        streams = [
            asyncio.ensure_future(stream(PORT, request, is_slow=is_slow, response=response))
            for request, response in zip(requests, responses, strict=True)
        ]
        while not all(each.times_s for each in responses):  # noqa: ASYNC110 - streams set no event
            await asyncio.sleep(0.005)
        begun.set()
        await asyncio.gather(*streams)

    asyncio.run(read())


async def _offered(requests: Sequence[bytes], rate: float, is_good: Callable[[StreamedResponse], bool]) -> float:
    """Offer requests at a rate for some seconds; return good ones a second."""
    seconds, chance = 8.0, random.Random(0)
    begun, due = time.perf_counter(), 0.0
    tasks: list[asyncio.Future[StreamedResponse]] = []
    while due < seconds:
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(stream(PORT, requests[len(tasks) % len(requests)])))
        due += chance.expovariate(rate)
    responses = await asyncio.gather(*tasks)
    return sum(map(is_good, responses)) / seconds


def _in_process(
    llm: LLM, chats: Sequence[Sequence[int]], params: SamplingParams, num_callers: int
) -> tuple[float, float]:
    """Answer prompts by AsyncLLM; return the processor time of the event loop, and of the process."""

    async def answer() -> tuple[float, float]:
        queue = list(chats)
        async with AsyncLLM(llm) as engine:

            async def work() -> None:
                while queue:
                    await engine.generate(queue.pop(), params).output()

            loop, process = time.thread_time(), time.process_time()
            await asyncio.gather(*(work() for _ in range(num_callers)))
            return time.thread_time() - loop, time.process_time() - process

    return asyncio.run(answer())


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
