"""Put a server of the demonstration's model under load: python -m benchmarks.server [--requests N] [--connections N].

Checks what it left behind (blocks, descriptors, memory), that answers are those of the engine alone, and that usage
adds up to the server's own numbers. Tells the processor time of HTTP: the server's, less what the engine takes for the
same work.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from benchmarks.server.load import MAX_TOKENS, Heard, Mix, ask_all
from pagedkv.serving.engine import LLM, EngineConfig, SamplingParams
from pagedkv.serving.engine.chat import chat_token_ids
from pagedkv.serving.engine.demo.questions import draw_questions
from pagedkv.serving.engine.demo.trained import load_demo
from pagedkv.serving.engine.demo.words import decode

PORT: Final = 8931
PATIENCE_S: Final = 600
NUM_DOCUMENTS: Final = 24
TICKS: Final = os.sysconf("SC_CLK_TCK")
MIB: Final = 2**20


def main() -> None:
    """Measure, check and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = [
        decode(question.prompt.tolist()[1:]) for question in draw_questions(arguments.requests, NUM_DOCUMENTS, 1)
    ]
    right, engine_s = alone(prompts)
    told: dict[str, float] = {"requests": len(prompts), "engine_processor_s": engine_s}
    for name, mix in (
        ("whole", Mix(streamed=0, bad=0)),
        ("streamed", Mix(streamed=1, left=0, slow=0, bad=0)),
        ("mixed", Mix()),
    ):
        with serving() as (url, process):
            asyncio.run(ask_all(url, prompts[:200], arguments.connections, Mix(), seed=2))  # connections, caches
            before = state_of(process)
            begun, spent = time.perf_counter(), processor_s(process)
            heard = asyncio.run(ask_all(url, prompts, arguments.connections, mix))
            told[f"{name}_wall_s"] = time.perf_counter() - begun
            told[f"{name}_processor_s"] = processor_s(process) - spent
            told[f"{name}_chunks"] = heard.num_chunks
            check(url, process, heard, right, before)
    told["http_ms_a_request"] = (told["whole_processor_s"] - engine_s) / len(prompts) * 1e3
    further = told["streamed_processor_s"] - told["whole_processor_s"]
    told["http_us_a_chunk"] = further / max(1, told["streamed_chunks"]) * 1e6
    sys.stdout.write("".join(f"{name:28} {value:12,.2f}\n" for name, value in told.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1))


def alone(prompts: Sequence[str]) -> tuple[dict[str, str], float]:
    """Answer prompts without HTTP; return the answers, and the processor time of the engine alone."""
    model, tokenizer = load_demo()
    llm = LLM(model, EngineConfig(num_blocks=2000, self_test=False, leases=True), tokenizer=tokenizer)
    chats = [chat_token_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    llm.generate(chats[:64], params)
    llm.reset_prefix_cache()
    begun = time.process_time()
    outputs = llm.generate(chats, params)
    spent = time.process_time() - begun
    return {prompt: output.completions[0].text or "" for prompt, output in zip(prompts, outputs, strict=True)}, spent


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Run ``pagedkv serve`` in a process of its own; yield its address and its number."""
    command = [
        sys.executable,
        "-m",
        "pagedkv",
        "serve",
        "--port",
        str(PORT),
        "--num-blocks",
        "2000",
        "--max-waiting",
        "4096",
    ]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{PORT}"
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < until, "the server did not begin"
                time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        assert process.wait(60) == 0, "the server did not end by itself"


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


def processor_s(process: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def state_of(process: int) -> tuple[int, int]:
    """Return open descriptors, and bytes of resident memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return len(list(Path(f"/proc/{process}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
