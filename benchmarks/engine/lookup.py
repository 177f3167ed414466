"""Tokens a second with and without guesses by lookup, of the demonstration's model, in turn.

    python -m benchmarks.engine.lookup [--rounds 5] [--sequences 4]

Two kinds of requests: a random text of 120 tokens and the beginning of its repetition, which the model goes on with;
and answers drawn with a temperature of 2 behind the same, of which hardly a guess is right. 96 new tokens each, one
thread, best of all rounds; the answers must be the same.
"""

import argparse
from time import perf_counter
from typing import Final

import torch
import transformers

from benchmarks.engine.guessing import Taken, Tokens, serve_counted
from pagedkv.engine import LLM, EngineConfig, PromptLookup, SamplingParams
from pagedkv.engine.demo.trained import load_trained
from pagedkv.probe import compat

LOOKUPS: Final = (0, 2, 4, 8)
NUM_TEXT: Final = 120
NUM_BEGUN: Final = 8
NUM_NEW: Final = 96
KINDS: Final = {
    "repetitive": SamplingParams(max_tokens=NUM_NEW, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, temperature=2.0, seed=1),
}


def make_prompts(vocabulary: int, num_sequences: int) -> Tokens:
    """Draw texts that begin to repeat themselves."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(2, vocabulary, (num_sequences, NUM_TEXT), generator=generator).tolist()
    return [[*text, *text[:NUM_BEGUN]] for text in texts]


def serve(model: compat.Model, prompts: Tokens, params: SamplingParams, num_tokens: int, taken: Taken) -> Tokens:
    """Serve once; return the answers."""
    speculation = PromptLookup(num_tokens) if num_tokens else None
    llm = LLM(model, EngineConfig(num_blocks=2000, self_test=False, speculation=speculation))
    return serve_counted(llm, prompts, params, perf_counter, taken)


def main() -> None:
    """Take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = load_trained()
    prompts = make_prompts(compat.vocabulary_size(model), given.sequences)
    for params in KINDS.values():
        serve(model, prompts, params, 4, Taken())  # compiles
    for kind, params in KINDS.items():
        taken = {num_tokens: Taken() for num_tokens in LOOKUPS}
        for _ in range(given.rounds):
            answers = [serve(model, prompts, params, num_tokens, each) for num_tokens, each in taken.items()]
            assert all(each == answers[0] for each in answers), "guesses have changed an answer"
        plain = min(taken[0].seconds)
        for num_tokens, each in taken.items():
            print(f"{kind:12} {num_tokens} guesses: {each.summary(given.sequences * NUM_NEW, plain)}")


if __name__ == "__main__":
    main()
