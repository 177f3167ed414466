"""What HTTP costs: 256 streams beside ``LLM.generate``: ``python -m benchmarks.server.through_http``.

The server has a process of its own, and its engine another; their processor time, user and system, is counted, that of
the client is not. Both ways answer the same prompts with the same model and as many threads, in turn, and the tokens
are compared first. Processor time is what a busy machine can still tell; tokens per second need two idle cores.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
import torch

from benchmarks.machine import describe
from benchmarks.markdown import table, with_table
from benchmarks.repository import ROOT
from benchmarks.server.prompts import NUM_BLOCKS, draw_prompts, engine_for
from benchmarks.server.serving import PORT, family, processor_s_each, serving
from benchmarks.server.streams import PATH, body_of, stream_all
from pagedkv.engine import SamplingParams

__all__ = ["tokens"]

NUM_STREAMS: Final = 256
NUM_TOKENS: Final = 64
OPTIONS: Final = ("--num-blocks", str(NUM_BLOCKS), "--max-sequences", str(NUM_STREAMS), "--max-waiting", "1024")
PAGE: Final = ROOT / "docs" / "server.md"
COMMAND: Final = "python -m benchmarks.server.through_http --write"
Figures: TypeAlias = dict[str, float]
GOALS: Final = {
    "streams_processor_ratio": "1.5",
    "streams_front_ratio": "",
    "streams_engine_ratio": "1.0",
    "streams_tokens_ratio": "0.8 on two idle cores",
    "streams_tokens_a_chunk": "",
}
MEANINGS: Final = {
    "streams_processor_ratio": "processor time of both processes, relative to `LLM.generate`",
    "streams_front_ratio": "of it, the server's process",
    "streams_engine_ratio": "of it, the engine's process",
    "streams_tokens_ratio": "tokens a second, relative to `LLM.generate`",
    "streams_tokens_a_chunk": "tokens a chunk",
}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.through_http", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--write", action="store_true", help="write the table of docs/server.md")
    given = parser.parse_args()
    figures = tokens(NUM_STREAMS, given.turns)
    machine = describe()
    told = table(("", "measured", "goal"), *((MEANINGS[name], f"{figures[name]:.2f}", GOALS[name]) for name in GOALS))
    sys.stdout.write(f"{told}\n")
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n", encoding="utf-8")
    if given.write:
        where = f"{machine['processor']}, {machine['cores']} cores, commit {machine['commit']}, {machine['date']}"
        busy = "" if figures["streams_idle_share"] > IDLE else "; other work had a part of the cores"
        text = f"`{COMMAND}`, {where}, medians of {given.turns} turns{busy}:\n\n{told}"
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "through HTTP", text), encoding="utf-8")


IDLE: Final = 0.9
"""Processor time by time of `LLM.generate` alone, from which on the machine counts as idle."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of both ways.

    Args:
        alone_s, alone_processor_s: `LLM.generate`; streamed_s: of the client; processor_s: front and engine.
        num_chunks: that came.
    """

    alone_s: float
    alone_processor_s: float
    streamed_s: float
    processor_s: Sequence[float]
    num_chunks: int

    @property
    def figures(self) -> Figures:
        """Ratios to what LLM.generate takes."""
        front, engine = (each / self.alone_processor_s for each in self.processor_s)
        return {
            "streams_tokens_ratio": self.alone_s / self.streamed_s,
            "streams_processor_ratio": front + engine,
            "streams_front_ratio": front,
            "streams_engine_ratio": engine,
            "streams_tokens_a_chunk": NUM_STREAMS * NUM_TOKENS / self.num_chunks,
            "streams_idle_share": self.alone_processor_s / self.alone_s,
        }


def tokens(num: int, num_turns: int = 3) -> Figures:
    """Measure 256 streams of 64 tokens, relative to LLM.generate with the same prompts: processor time, and tokens/s.

    Both hit what earlier turns computed, so the first turn of each is left out.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # as the engine of a server
    prompts = draw_prompts(max(num, NUM_STREAMS))[:NUM_STREAMS]
    chats, llm = engine_for(prompts, NUM_STREAMS)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [body_of(prompt, NUM_TOKENS, stream=True) for prompt in prompts]

    def alone() -> list[tuple[int, ...]]:
        return [output.token_ids for output in llm.generate(chats, params)]

    def turn(processes: Sequence[int]) -> Turn:
        begun, spent = time.perf_counter(), time.process_time()
        alone()
        alone_s, alone_processor_s = time.perf_counter() - begun, time.process_time() - spent
        before, begun = processor_s_each(processes), time.perf_counter()
        streams = asyncio.run(stream_all(PORT, requests, len(requests)))
        streamed_s, after = time.perf_counter() - begun, processor_s_each(processes)
        taken = [now - then for then, now in zip(before, after, strict=True)]
        return Turn(alone_s, alone_processor_s, streamed_s, taken, sum(each.num_chunks for each in streams))

    with serving(*OPTIONS) as process:
        streamed = asyncio.run(_ids_of(f"http://127.0.0.1:{PORT}{PATH}", prompts))
        assert streamed == alone(), "streams have other tokens than LLM.generate"
        turns = [turn(family(process)).figures for _ in range(num_turns)]
    return {name: statistics.median(each[name] for each in turns) for name in turns[0]}


async def _ids_of(url: str, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt's stream."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=len(prompts))) as client:

        async def ids(prompt: str) -> tuple[int, ...]:
            request = json.loads(
                body_of(prompt, NUM_TOKENS, stream=True, return_token_ids=True).partition(b"\r\n\r\n")[2]
            )
            found: list[int] = []
            async with client.stream("POST", url, json=request) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        chunk: dict[str, Any] = json.loads(line[6:])
                        found += [token for choice in chunk["choices"] for token in choice.get("token_ids", ())]
            return tuple(found)

        return await asyncio.gather(*map(ids, prompts))


if __name__ == "__main__":
    main()
