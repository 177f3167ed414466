"""Put a server of the demonstration's model under load: python -m benchmarks.server [--requests N] [--parts NAMES].

The load checks what the server left behind (blocks, descriptors, memory), that answers are those of the engine alone,
and that usage adds up to the server's own numbers. The other parts measure (benchmarks/server/parts.py).
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from benchmarks.machine import describe
from benchmarks.server.load import MAX_TOKENS, Heard, Mix, ask_all
from benchmarks.server.parts import PARTS
from benchmarks.server.serving import PORT, serving, state_of
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.engine.demo.serving import decode, draw_questions
from pagedkv.engine.demo.trained import load_demo
from pagedkv.engine.prompts import chat_token_ids

NUM_DOCUMENTS: Final = 24
MIB: Final = 2**20


def main() -> None:
    """Measure, check and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="of the load")
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--measured", type=int, default=300, help="requests of the other parts")
    parser.add_argument("--parts", default=f"load,{','.join(PARTS)}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for part in arguments.parts.split(","):
        if part == "load":
            figures |= load(arguments.requests, arguments.connections)
        else:
            figures |= PARTS[part](arguments.measured)
        sys.stdout.write("".join(f"{name:32} {value:14,.3f}\n" for name, value in figures.items()) + "\n")
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), **figures}, indent=1))


def load(num_requests: int, num_connections: int) -> dict[str, float]:
    """Put a server under a mixed load, and check what it answered and left behind."""
    questions = draw_questions(num_requests, NUM_DOCUMENTS, 1)
    prompts = [decode(question.prompt.tolist()[1:]) for question in questions]
    right = alone(prompts)
    url = f"http://127.0.0.1:{PORT}"
    with serving("--num-blocks", "2000", "--max-waiting", "4096") as process:
        asyncio.run(ask_all(url, prompts[:200], num_connections, Mix(), seed=2))  # connections, caches
        before = state_of(process)
        begun = time.perf_counter()
        heard = asyncio.run(ask_all(url, prompts, num_connections, Mix()))
        wall_s = time.perf_counter() - begun
        check(url, process, heard, right, before)
    return {"load_requests": len(prompts), "load_left": heard.num_left, "load_wall_s": wall_s}


def alone(prompts: Sequence[str]) -> dict[str, str]:
    """Answer prompts without HTTP."""
    model, tokenizer = load_demo()
    llm = LLM(model, EngineConfig(num_blocks=2000, self_test=False, leases=True), tokenizer=tokenizer)
    chats = [chat_token_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    outputs = llm.generate(chats, params)
    return {prompt: output.completions[0].text or "" for prompt, output in zip(prompts, outputs, strict=True)}


def check(url: str, process: int, heard: Heard, right: dict[str, str], before: tuple[int, int]) -> None:
    """Hold what clients heard against the engine's answers and the server's numbers."""
    time.sleep(1)
    numbers = dict(re.findall(r"^([\w:]+)\{[^}]*\} ([\d.e+-]+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    assert float(numbers["vllm:num_requests_running"]) == float(numbers["vllm:kv_cache_usage_perc"]) == 0, numbers
    wrong = [prompt for prompt, texts in heard.answers.items() if texts != {right[prompt]}]
    assert not wrong, (
        f"{len(wrong)} prompts were answered otherwise than by the engine alone: {heard.answers[wrong[0]]}"
    )
    assert set(heard.statuses) <= {200, 400}, heard.statuses
    descriptors, resident = state_of(process)
    assert descriptors <= before[0] + 5, f"{before[0]} descriptors were open, and {descriptors} are"
    assert resident <= before[1] + 200 * MIB, f"memory grew from {before[1] / MIB:.0f} to {resident / MIB:.0f} MiB"


if __name__ == "__main__":
    main()
