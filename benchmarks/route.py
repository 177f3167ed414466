"""Two stock vLLM servers, the same requests in turn: through ``pagedkv route``, and by the rule of Ray's router.

    python -m benchmarks.route http://127.0.0.1:8101,tcp://127.0.0.1:6011,tcp://127.0.0.1:6012 \
        http://127.0.0.1:8102,tcp://127.0.0.1:6021,tcp://127.0.0.1:6022 --blocks 100 --block-size 32 [--json FILE]

Each engine is URL,EVENTS,REPLAY, as it was started, with ``--enable-prompt-tokens-details``. 24 conversations of four
kinds take six turns, four conversations at a time, and then one after the other; those of one kind share a beginning,
and each turn has the prompt and the answer of the turn before. A burst is 400 prompts with 1,600 equal tokens at once
(``--burst``). For each way of routing prompts begin differently, so that nothing is left of the way before. By Ray's
rule (:mod:`benchmarks.ray_rule`) the client itself chooses the engine.

Hits are the engines' own ``cached_tokens``. They are compared with one pool of the summed blocks that is served the
same requests in the order in which they ended, and each with what the router expected when it sent the request, which
is exact where the events of all requests before were received: one after the other. Last, short requests are sent to an
engine, straight and through the router in turn: what the router adds to the first token.
"""

import argparse
import asyncio
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias, cast, final

import httpx
import numpy as np
import uvicorn

from benchmarks.machine import describe
from benchmarks.ray_rule import RayRule
from pagedkv import Allocation, BlockSpace, FullAttention, SpaceConfig
from pagedkv.listening import bound
from pagedkv.route import Engine, EngineRouter, RouteConfig, create_app
from pagedkv.routing import Routing
from pagedkv.warming import ROUTING

NUM_KINDS: Final = 4
SHARED_TOKENS: Final = 160
TURN_TOKENS: Final = 64
ANSWER_TOKENS: Final = 16
AT_ONCE: Final = 4
BURST: Final = 400
BURST_TOKENS: Final = 1600
RAY: Final = "Ray"
MANY: Final = httpx.Limits(max_connections=None)
LEAST_TOKEN: Final = 10
NUM_TOKENS: Final = 3000
OWN_TIMES: Final = re.compile(r"tokenise;dur=([\d.]+), choose;dur=([\d.]+)")


@dataclass(frozen=True)
class Answered:
    """One request as it was answered."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    num_cached: int
    num_predicted: int
    engine: str
    first_s: float


@dataclass(frozen=True)
class Row:
    """What one way of routing came to."""

    routing: str
    load: str
    num_requests: int
    hit_ratio: float
    of_one_pool: float
    exact_predictions: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    by_engine: dict[str, int]


@final
class ByRay:
    """Sends each request to the engine that Ray's rule chooses.

    Args:
        clients: of the engines, by address.
    """

    def __init__(self, clients: Mapping[str, httpx.AsyncClient]) -> None:
        self._clients = clients
        self._rule = RayRule([*clients])
        self._queues = dict.fromkeys(clients, 0)

    @asynccontextmanager
    async def stream(self, method: str, path: str, *, json: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Send a request whose prompt is a list of tokens."""
        name = self._rule.choose(json["prompt"], self._queues, time.monotonic())
        self._queues[name] += 1
        try:
            async with self._clients[name].stream(method, path, json=json) as answer:
                answer.headers["x-pagedkv-replica"] = name
                yield answer
        finally:
            self._queues[name] -= 1


Client: TypeAlias = httpx.AsyncClient | ByRay


@asynccontextmanager
async def clients_of(engines: Sequence[Engine], way: str) -> AsyncIterator[Client]:
    """Yield what requests are sent through."""
    if way != RAY:
        async with routed(engines, cast("Routing", way)) as (client, _):
            yield client
        return
    async with AsyncExitStack() as stack:
        made = [httpx.AsyncClient(base_url=each.url, timeout=300, limits=MANY) for each in engines]
        yield ByRay({each.url: await stack.enter_async_context(one) for each, one in zip(engines, made, strict=True)})


@asynccontextmanager
async def routed(engines: Sequence[Engine], routing: Routing) -> AsyncIterator[tuple[httpx.AsyncClient, EngineRouter]]:
    """Serve a router in this process."""
    sockets = bound("127.0.0.1", 0)
    with EngineRouter(engines, routing=routing) as router:
        server = uvicorn.Server(
            uvicorn.Config(create_app(router, RouteConfig()), log_level="critical", lifespan="on", access_log=False)
        )
        serving = asyncio.create_task(server.serve(sockets))
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=MANY) as client:
            while not server.started:  # noqa: ASYNC110 - uvicorn tells it by nothing else
                await asyncio.sleep(0.05)
            yield client, router
            server.should_exit = True
            await serving


async def ask(client: Client, model: str, prompt: Sequence[int]) -> Answered:
    """Send one request, as a stream."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    began_s, first_s, cached = time.perf_counter(), 0.0, 0
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        headers = answer.headers
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.perf_counter() - began_s
            piece = json.loads(line[6:])
            for choice in piece["choices"]:
                tokens += choice.get("token_ids") or []
            if piece.get("usage"):
                cached = (piece["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    predicted = int(headers.get("x-pagedkv-cached", -1))
    return Answered(tuple(prompt), tuple(tokens), cached, predicted, headers.get("x-pagedkv-replica", ""), first_s)


def drawn(random: Random, num: int) -> list[int]:
    """Draw tokens."""
    return [LEAST_TOKEN + random.randrange(NUM_TOKENS) for _ in range(num)]


async def converse(  # noqa: PLR0913, PLR0917 - a conversation, and where it is held
    client: Client, model: str, number: int, turns: int, mark: int, done: list[Answered]
) -> None:
    """Hold one conversation; its tokens depend on its number and the mark alone."""
    random = Random(number)
    prompt = [LEAST_TOKEN + mark, *drawn(Random(number % NUM_KINDS), SHARED_TOKENS - 1)]
    for _ in range(turns):
        prompt = [*prompt, *drawn(random, TURN_TOKENS)]
        answered = await ask(client, model, prompt)
        done.append(answered)
        prompt = [*prompt, *answered.answer]
        await asyncio.sleep(random.uniform(0.05, 0.3))


async def hold_all(  # noqa: PLR0913, PLR0917 - as converse
    client: Client, model: str, conversations: int, turns: int, mark: int, at_once: int
) -> list[Answered]:
    """Hold conversations, some at a time."""
    done: list[Answered] = []
    waiting = iter(range(conversations))

    async def work() -> None:
        for number in waiting:
            await converse(client, model, number, turns, mark, done)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return done


async def burst(client: Client, model: str, mark: int, num: int, num_shared: int) -> list[Answered]:
    """Send prompts with one beginning at once; they are told in the order in which they ended."""
    shared = [LEAST_TOKEN + mark, *drawn(Random(1000), num_shared)]
    asked = [ask(client, model, [*shared, *drawn(Random(each), 8)]) for each in range(num)]
    return [await answered for answered in asyncio.as_completed(asked)]


def hits_of_one_pool(done: Sequence[Answered], num_blocks: int, block_size: int) -> int:
    """Serve the same requests, one after the other, from one pool of all blocks; return the tokens that hit."""
    group = FullAttention(block_size)
    space = BlockSpace(SpaceConfig((group,), num_blocks=num_blocks, max_sequences=2))
    hits = 0
    for each in done:
        hits += space.match(np.array(each.prompt, np.int32)).num_tokens
        whole = np.array([*each.prompt, *each.answer[:-1]], np.int32)
        allocated = space.allocate(whole)
        assert isinstance(allocated, Allocation)
        space.acknowledge(space.plan_step().step_id)
        space.free(allocated.row)
    return hits


def row_of(routing: str, load: str, done: Sequence[Answered], num_blocks: int, block_size: int) -> Row:
    """Sum up one way of routing."""
    tokens, hits = sum(len(each.prompt) for each in done), sum(each.num_cached for each in done)
    first_ms = np.array([1000 * each.first_s for each in done])
    p50, p99 = np.percentile(first_ms, [50, 99]).tolist()
    exact = statistics.fmean(each.num_predicted == each.num_cached for each in done)
    one_pool = hits_of_one_pool(done, num_blocks, block_size)
    by_engine = dict(Counter(each.engine for each in done))
    return Row(routing, load, len(done), hits / tokens, hits / max(1, one_pool), exact, p50, p99, by_engine)


async def overhead(engines: Sequence[Engine], model: str, num: int) -> dict[str, float]:
    """Return milliseconds to the first token, straight and through the router, and what of it is tokenising."""
    straight, through, tokenised, chosen = [], [], [], []
    text = "a short question about routing " * 40
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
    async with routed(engines[:1], "prefix") as (client, _), httpx.AsyncClient(base_url=engines[0].url) as own:
        for number in range(2 * num):
            began_s = time.perf_counter()
            answer = await (client if number % 2 else own).post("/v1/completions", json=body)
            answer.raise_for_status()
            ms = 1000 * (time.perf_counter() - began_s)
            if not number % 2:
                straight.append(ms)
                continue
            through.append(ms)
            found = OWN_TIMES.match(answer.headers["server-timing"])
            assert found is not None
            tokenised.append(float(found[1]))
            chosen.append(float(found[2]))
    added = statistics.median(through) - statistics.median(straight)
    of_tokens = statistics.median(tokenised)
    return {
        "straight_ms": statistics.median(straight),
        "through_ms": statistics.median(through),
        "added_ms": added,
        "tokenise_ms": of_tokens,
        "choose_ms": statistics.median(chosen),
        "added_without_tokenising_ms": added - of_tokens,
    }


async def measure(engines: Sequence[Engine], model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all."""
    num_blocks = len(engines) * arguments.blocks
    rows, mark = [], arguments.mark
    ways = ("prefix", "round-robin", RAY)
    for at_once, name in ((AT_ONCE, "conversations"), (1, "one by one")):
        for routing in ways:
            mark += 1
            async with clients_of(engines, routing) as client:
                done = await hold_all(client, model, arguments.conversations, arguments.turns, mark, at_once)
            rows.append(row_of(routing, name, done, num_blocks, arguments.block_size))
    for routing in ways:
        mark += 1
        async with clients_of(engines, routing) as client:
            done = await burst(client, model, mark, *arguments.burst)
        rows.append(row_of(routing, "burst", done, num_blocks, arguments.block_size))
    return {"rows": [asdict(row) for row in rows], "overhead": await overhead(engines, model, arguments.requests)}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", metavar="URL,EVENTS,REPLAY")
    parser.add_argument("--blocks", type=int, required=True, help="blocks of each engine")
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--burst", type=int, nargs=2, default=[BURST, BURST_TOKENS], metavar=("PROMPTS", "TOKENS"))
    parser.add_argument("--requests", type=int, default=60, help="of the overhead, each way")
    parser.add_argument("--mark", type=int, default=0, help="another one for another run with the same engines")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engines = [Engine(*each.split(",")) for each in arguments.engines]
    model = httpx.get(f"{engines[0].url}/v1/models").json()["data"][0]["id"]
    ROUTING.compile()
    found = asyncio.run(measure(engines, model, arguments))
    print(f"{'load':14} {'routing':12} {'hits':>7} {'of one pool':>12} {'predicted':>10} {'first token':>22}")
    for row in found["rows"]:
        times = f"{row['first_token_p50_ms']:.0f}, {row['first_token_p99_ms']:.0f} ms"
        print(
            f"{row['load']:14} {row['routing']:12} {100 * row['hit_ratio']:6.1f}% {row['of_one_pool']:12.3f} "
            f"{100 * row['exact_predictions']:9.1f}% {times:>22}  {list(row['by_engine'].values())}"
        )
    print(", ".join(f"{name} {value:.2f}" for name, value in found["overhead"].items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": describe(), **found}, indent=1))


if __name__ == "__main__":
    main()
