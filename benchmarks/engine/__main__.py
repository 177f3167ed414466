"""Serve 32 prompts, half of which share 96 tokens, 48 new tokens each, on one thread, in turn by four ways.

    python -m benchmarks.engine [--rounds 5]

The model is a Llama of 4 layers and 256 dimensions with random weights. Ways: this engine; ``generate`` on padded
prompts; transformers' continuous batching with pages of 16 and of 256 tokens, its start included. Best of all rounds.
"""

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeAlias, cast

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from benchmarks.engine.small_model import VOCABULARY, make_model
from pagedkv.engine import LLM, EngineConfig, SamplingParams

Tokens: TypeAlias = list[list[int]]

NUM_NEW: Final = 48
NUM_PROMPTS: Final = 32
NUM_SLOTS: Final = 64_000


def make_prompts() -> Tokens:
    """Make 16 prompts that share 96 tokens, and 16 of their own, 24 to 117 tokens long."""
    generator = torch.Generator().manual_seed(1)

    def draw(num_tokens: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (num_tokens,), generator=generator).tolist()

    shared = draw(96)
    return [shared + draw(8 + place) if place % 2 else draw(24 + 3 * place) for place in range(NUM_PROMPTS)]


def run_engine(model: LlamaForCausalLM, prompts: Tokens) -> tuple[float, Tokens]:
    """Serve by the engine; its memory is made before."""
    llm = LLM(model, EngineConfig(num_blocks=2000, max_sequences=NUM_PROMPTS, self_test=False))
    start = perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=NUM_NEW))
    return perf_counter() - start, [list(output.token_ids) for output in outputs]


def run_padded(model: LlamaForCausalLM, prompts: Tokens) -> tuple[float, Tokens]:
    """Serve by ``generate``, prompts padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = perf_counter()
    with torch.inference_mode():
        out = cast("Any", model).generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False)
    return perf_counter() - start, out[:, longest:].tolist()


def run_continuous(model: LlamaForCausalLM, prompts: Tokens, page_size: int) -> tuple[float, Tokens]:
    """Serve by transformers' continuous batching, with room for 64,000 tokens."""
    wishes = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(page_size=page_size, num_blocks=NUM_SLOTS // page_size)
    start = perf_counter()
    outputs = cast("Any", model).generate_batch(
        inputs=prompts, generation_config=wishes, continuous_batching_config=pages, progress_bar=False
    )
    return perf_counter() - start, [output.generated_tokens for output in outputs.values()]


WAYS: Final[dict[str, Callable[[LlamaForCausalLM, Tokens], tuple[float, Tokens]]]] = {
    "this engine": run_engine,
    "generate, padded": run_padded,
    "continuous batching, pages of 16": partial(run_continuous, page_size=16),
    "continuous batching, pages of 256": partial(run_continuous, page_size=256),
}


def main() -> None:
    """Take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model, prompts = make_model(), make_prompts()
    run_engine(model, prompts)  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        expected: Tokens | None = None
        for name, run in WAYS.items():
            taken, answers = run(model, prompts)
            assert expected is None or answers == expected, f"{name} answers otherwise than the engine"
            expected = answers
            seconds[name].append(taken)
    for name, taken_each in seconds.items():
        speed = NUM_PROMPTS * NUM_NEW / min(taken_each)
        ratio = min(taken_each) / min(seconds["this engine"])
        print(f"{name:36} {speed:8,.0f} tokens/s   the engine: {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
