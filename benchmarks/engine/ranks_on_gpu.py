"""One model on several GPUs: decode steps and prompts on 1, 2, 4 and 8 ranks; the shape of an 8B Llama, random weights.

    python -m benchmarks.engine.ranks_on_gpu [--ranks 1 2] [--rows 1 8 64] [--json FILE]

Prompts of 1,024 tokens that share nothing are computed; then all decode 127 tokens more, and these steps are timed.
Several ranks have one process each, on one host. Tokens are the most likely ones. ``open``: as an engine comes.
"""

import argparse
import gc
import json
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import torch

from benchmarks.engine.on_gpu import NUM_NEW, PROMPT, VOCABULARY, make_model
from benchmarks.machine import describe
from pagedkv.engine import LLM, EngineConfig, RankGroup, SamplingParams

WAYS: Final = ("open", "compiled", "captured", "plain")
"""As it comes: compiled, captured, overlapped; without overlap; captured; call by call."""
ROWS: Final = (1, 8, 64)
PARAMS: Final = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
PATIENCE_S: Final = 300


@dataclass(frozen=True)
class Decoded:
    """What one engine did.

    Args:
        num_ranks: of the model; way: one of :data:`WAYS`; num_rows: sequences.
        step_ms: a decode step, the median; tokens_per_s: of it. prompt_tokens_per_s: of the steps before.
        kv_gib, weights_gib: on each GPU.
        refusal: why steps were not replayed.
    """

    num_ranks: int
    way: str
    num_rows: int
    step_ms: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    kv_gib: float
    weights_gib: float
    refusal: str | None


def decode(llm: LLM, num_ranks: int, way: str, num_rows: int) -> Decoded:
    """Let as many sequences decode together, and time their steps."""
    generator = torch.Generator().manual_seed(num_rows)
    llm.submit(torch.randint(5, VOCABULARY, (num_rows, PROMPT), generator=generator).tolist(), PARAMS)
    prompt_s, steps = 0.0, []
    while llm.core.has_work:
        begun = perf_counter()
        record = llm.step()
        seconds = perf_counter() - begun
        if record.num_prefilled:
            prompt_s += seconds
        elif record.num_decoded == num_rows:
            steps.append(seconds)
    step_s = median(steps)
    memory = llm.core.memory
    return Decoded(
        num_ranks,
        way,
        num_rows,
        1e3 * step_s,
        num_rows / step_s,
        num_rows * PROMPT / prompt_s,
        memory.kv_nbytes / 2**30,
        memory.weights_nbytes / 2**30,
        llm.core.capture_state.refusal,
    )


def run_rank(rank: int, num_ranks: int, address: str, ways: list[str], rows: list[int]) -> list[Decoded]:
    """Serve as one rank; return what rank 0 measured."""
    ranks = RankGroup(rank, num_ranks, address, device="cuda") if num_ranks > 1 else None
    found: list[Decoded] = []
    for way in ways:
        config = EngineConfig(
            num_blocks=max(rows) * (PROMPT + NUM_NEW + 32) // 16 + 64,
            max_sequences=max(rows),
            max_batched_tokens=8192,
            max_tokens=2048,
            self_test=False,
            capture_steps=way != "plain",
            compile_model=None if way == "open" else way == "compiled",
            overlap=None if way == "open" else False,
        )
        llm = LLM(make_model("llama", None), config, ranks=ranks)
        if ranks is None or ranks.is_first:
            decode(llm, num_ranks, way, rows[0])  # compiles kernels, proves graphs
            found += [decode(llm, num_ranks, way, each) for each in rows]
        if ranks is not None:
            if ranks.is_first:
                ranks.end()
            else:
                llm.follow()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    if ranks is not None:
        ranks.close()
    return found


def run_ranks(num_ranks: int, ways: list[str], rows: list[int]) -> list[Decoded]:
    """Run all ranks, each in a process; return what rank 0 measured."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{any_port.getsockname()[1]}"
    words = [str(num_ranks), address, ",".join(ways), *map(str, rows)]
    own = [sys.executable, "-m", "benchmarks.engine.ranks_on_gpu", "--rank"]
    processes = [
        subprocess.Popen([*own, str(rank), *words], stdout=subprocess.PIPE, text=True) for rank in range(num_ranks)
    ]
    try:
        lines = processes[0].communicate(timeout=PATIENCE_S)[0].splitlines()
    finally:
        for process in processes:
            process.kill()
    return [Decoded(**each) for each in json.loads(lines[-1])]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, nargs="+", default=[each for each in (1, 2, 4, 8) if each <= count])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank, num_ranks, address, ways, *rows = given.rank
        found = run_rank(int(rank), int(num_ranks), address, ways.split(","), list(map(int, rows)))
        print(json.dumps([asdict(each) for each in found]))
        return
    measured: list[Decoded] = []
    print("ranks  way       rows  ms a step  tokens/s  prompts, tokens/s  KV GiB  weights GiB")
    for num_ranks in given.ranks:
        measured += (found := run_ranks(num_ranks, given.ways, given.rows))
        for each in found:
            print(
                f"{each.num_ranks:5d}  {each.way:8s}  {each.num_rows:4d}  {each.step_ms:9.2f}  "
                f"{each.tokens_per_s:8,.0f}  {each.prompt_tokens_per_s:17,.0f}  {each.kv_gib:6.2f}  "
                f"{each.weights_gib:11.2f}  {each.refusal or ''}",
                flush=True,
            )
    if given.json is not None:
        rows = {"machine": describe(), "gpu": torch.cuda.get_device_name(), "rows": [asdict(each) for each in measured]}
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
