"""Serve 48 short prompts, of 4 to 15 tokens with 8 new ones each, on one thread, beside ``generate`` on padded prompts.

    python -m benchmarks.engine.short_prompts [--rounds 9]

The model is that of :mod:`benchmarks.engine`. Padding costs little here: a batch of such prompts is as wide as the
longest. Seconds are the process's own, so that a busy machine changes little; best of all rounds, in turn.
"""

import argparse
from time import process_time
from typing import Final

import torch
import transformers
from transformers import LlamaForCausalLM

from benchmarks.engine.__main__ import Tokens
from benchmarks.engine.small_model import VOCABULARY, make_model
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.probe import compat

NUM_PROMPTS: Final = 48
NUM_NEW: Final = 8


def make_prompts() -> Tokens:
    """Make prompts that have nothing in common."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(2, VOCABULARY, (4 + place % 12,), generator=generator).tolist() for place in range(NUM_PROMPTS)
    ]


def run_engine(model: LlamaForCausalLM, prompts: Tokens) -> tuple[float, Tokens]:
    """Serve by the engine, whose memory is made before."""
    llm = LLM(model, EngineConfig(num_blocks=2000, max_sequences=NUM_PROMPTS, self_test=False))
    start = process_time()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=NUM_NEW))
    return process_time() - start, [list(output.token_ids) for output in outputs]


def run_padded(model: LlamaForCausalLM, prompts: Tokens) -> tuple[float, Tokens]:
    """Serve by ``generate``, prompts padded on the left."""
    tensors = [torch.tensor(prompt) for prompt in prompts]
    start = process_time()
    answers = compat.generate_padded(model, tensors, NUM_NEW)
    return process_time() - start, answers


def main() -> None:
    """Take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model, prompts = make_model(), make_prompts()
    run_engine(model, prompts)  # compiles
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        taken, answers = run_engine(model, prompts)
        ours.append(taken)
        taken, expected = run_padded(model, prompts)
        theirs.append(taken)
        assert answers == expected, "the engine answers otherwise than generate"
    print(f"this engine       {1e3 * min(ours):8.1f} ms of processor time")
    print(f"generate, padded  {1e3 * min(theirs):8.1f} ms")
    print(f"the engine is     {min(theirs) / min(ours):8.2f} times as fast")


if __name__ == "__main__":
    main()
