"""Two engines under opposite loads: a fixed half of the memory each, or a broker that moves it; random weights.

    python -m benchmarks.engine.shared_memory [--device cuda --size 1b --gib 8] [--json FILE]

First one engine has many requests and the other a few, then the other way round. Both ways serve the same requests, a
step of each engine in turn, and have the same bytes in all. Tokens per round (a step of each engine that has work) do
not depend on how busy the machine is; seconds do. Every answer must have all its tokens, and on a CPU those of the
other way.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import describe
from pagedkv.engine import LLM, EngineConfig, EngineRequest, MemoryBroker, SamplingParams, StepRecord

Way: TypeAlias = Literal["fixed halves", "broker"]
WAYS: Final[tuple[Way, ...]] = ("fixed halves", "broker")
SMALL: Final = 0.98  # of the memory: most that one engine may come to have


@dataclass(frozen=True, slots=True)
class Load:
    """What is served.

    Args:
        num_busy, num_idle: requests of the engine with many, and of the one with few.
        num_prompt, num_new: tokens of each.
    """

    num_busy: int
    num_idle: int
    num_prompt: int
    num_new: int


@dataclass(frozen=True, slots=True)
class Served:
    """What one way took.

    Args:
        way: which; num_tokens: of all answers; num_rounds: steps of both engines, in turn; seconds: of all rounds.
        num_failed: requests whose answer lacks tokens; num_moves: pieces of memory that changed their engine.
        num_recomputed: preemptions.
    """

    way: Way
    num_tokens: int
    num_rounds: int
    seconds: float
    num_failed: int
    num_moves: int
    num_recomputed: int


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}


def new_model(seed: int, size: str, device: str) -> LlamaForCausalLM:
    """Make a Llama of random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPES[size], vocab_size=2048, num_key_value_heads=4, max_position_embeddings=4096, eos_token_id=None
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return cast("LlamaForCausalLM", LlamaForCausalLM(config).eval().to(device, dtype))


def engines_of(way: Way, models: Sequence[LlamaForCausalLM], nbytes: int, load: Load) -> list[LLM]:
    """Build an engine for each model: with half of the bytes, or with half of those that each may come to have."""
    config = EngineConfig(
        kv_nbytes=nbytes // 2 if way == "fixed halves" else int(SMALL * nbytes),
        kv_at_first=None if way == "fixed halves" else 0.5 / SMALL,
        max_sequences=load.num_busy,
        max_tokens=load.num_prompt + load.num_new,
        mean_tokens=load.num_prompt + load.num_new,
        self_test=False,
    )
    return [LLM(model, config) for model in models]


def serve(way: Way, models: Sequence[LlamaForCausalLM], nbytes: int, load: Load) -> tuple[Served, list[list[int]]]:
    """Serve both loads in one way; return what it took, and the answers."""
    llms = engines_of(way, models, nbytes, load)
    broker = MemoryBroker([llm.core for llm in llms]) if way == "broker" else None
    requests: list[tuple[LLM, EngineRequest]] = []
    records: list[StepRecord] = []
    num_rounds, start = 0, perf_counter()
    for busy in (0, 1):
        for number, llm in enumerate(llms):
            count = load.num_busy if number == busy else load.num_idle
            generator = torch.Generator().manual_seed(2 * busy + number)
            prompts = torch.randint(2, 2048, (count, load.num_prompt), generator=generator).tolist()
            params = SamplingParams(max_tokens=load.num_new, ignore_eos=True)
            requests += [(llm, request) for request in llm.submit(prompts, params)]
        while any(llm.core.has_work for llm in llms):
            records += step(llms, broker)
            num_rounds += 1
    seconds = perf_counter() - start
    answers = [list(llm.output(request).completions[0].token_ids) for llm, request in requests]
    for llm in llms:
        llm.core.space.check()
        llm.close()
    served = Served(
        way,
        sum(map(len, answers)),
        num_rounds,
        seconds,
        sum(len(answer) < load.num_new for answer in answers),
        broker.num_moves if broker is not None else 0,
        sum(record.num_recomputed for record in records),
    )
    return served, answers


def step(llms: Sequence[LLM], broker: MemoryBroker | None) -> list[StepRecord]:
    """Run a step of each engine that has work."""
    if broker is not None:
        return [record for record in broker.step() if record is not None]
    return [llm.step() for llm in llms if llm.core.has_work]


def main() -> None:
    """Serve in both ways, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--gib", type=float, default=0.008)
    parser.add_argument("--busy", type=int, default=24)
    parser.add_argument("--idle", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    load = Load(given.busy, given.idle, given.prompt, given.new)
    models = [new_model(seed, given.size, given.device) for seed in (0, 1)]
    found: list[Served] = []
    for _ in range(given.rounds):
        results = {way: serve(way, models, int(given.gib * 2**30), load) for way in WAYS}
        found += [served for served, _ in results.values()]
        answers = [answers for _, answers in results.values()]
        assert given.device == "cuda" or answers[0] == answers[1], "the two ways answer differently"
        for served in found[-len(WAYS) :]:
            assert not served.num_failed, f"{served.way}: {served.num_failed} requests have not all their tokens"
            print(
                f"{served.way:14} {served.num_tokens / served.num_rounds:7.2f} tokens/round "
                f"{served.num_tokens / served.seconds:9,.0f} tokens/s, {served.num_rounds} rounds, "
                f"{served.num_moves} pieces moved, {served.num_recomputed} preemptions"
            )
        halves, shared = found[-len(WAYS) :]
        print(
            f"{'broker / halves':14} {halves.num_rounds / shared.num_rounds:.2f} in rounds, "
            f"{halves.seconds / shared.seconds:.2f} in seconds"
        )
    if given.json is not None:
        document = {"machine": describe(), "arguments": str(given), "served": [asdict(each) for each in found]}
        given.json.write_text(json.dumps(document, indent=1), encoding="ascii")


if __name__ == "__main__":
    main()
