"""Tokens a second with and without a draft model, of two models on a CPU, in turn.

    python -m benchmarks.engine.drafts [--rounds 5] [--sequences 4]

Targets are the benchmark's Llama (4 layers, random weights), the demonstration's model (2 layers, trained), and a Llama
of 16 layers of which all but the first were made to change little, so that its first layer often agrees with it. Draft
models are the target itself, of which every draft is right, and its first layer with its head. 64 new tokens each
behind 64, the most likely ones, best of all rounds, in seconds of the process, which has one thread; the answers must
be the same.
"""

import argparse
import copy
from time import process_time
from typing import Any, Final, cast

import torch
import transformers
from torch import nn

from benchmarks.engine.guessing import Taken, Tokens, serve_counted
from benchmarks.engine.small_model import make_model
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.engine.demo.trained import load_trained
from pagedkv.probe import compat

NUM_PROMPT: Final = 64
NUM_NEW: Final = 64
NUM_DRAFT_TOKENS: Final = (2, 4)
PARAMS: Final = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


def first_layers(model: compat.Model, num_layers: int) -> compat.Model:
    """Copy a Llama with its first layers alone."""
    shorter = cast("Any", copy.deepcopy(model))
    shorter.model.layers = nn.ModuleList(shorter.model.layers[:num_layers])
    shorter.config.num_hidden_layers = num_layers
    shorter.config.layer_types = None
    return cast("compat.Model", shorter.eval())


def make_agreeing(num_layers: int = 16, share: float = 0.02) -> compat.Model:
    """Make a Llama whose layers behind the first add little to what the first has found."""
    model = cast("Any", make_model(num_layers=num_layers))
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(share)
            layer.mlp.down_proj.weight.mul_(share)
    return cast("compat.Model", model)


def serve(
    model: compat.Model, draft_model: compat.Model | None, num_draft_tokens: int, prompts: Tokens, taken: Taken
) -> Tokens:
    """Serve once; return the answers."""
    config = EngineConfig(num_blocks=2000, self_test=False, num_draft_tokens=num_draft_tokens)
    llm = LLM(model, config, draft_model=draft_model)
    return serve_counted(llm, prompts, PARAMS, process_time, taken)


def measure(name: str, model: compat.Model, num_rounds: int, num_sequences: int) -> None:
    """Take turns on one target, and print a line for each way."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = compat.vocabulary_size(model)
    prompts = torch.randint(2, vocabulary, (num_sequences, NUM_PROMPT), generator=generator).tolist()
    ways: dict[tuple[str, int], compat.Model | None] = {("no draft model", 0): None}
    ways |= {("its first layer", count): first_layers(model, 1) for count in NUM_DRAFT_TOKENS}
    ways |= {("the target itself", count): model for count in NUM_DRAFT_TOKENS}
    for (_, count), draft in ways.items():
        serve(model, draft, count, prompts, Taken())  # compiles
    taken = {way: Taken() for way in ways}
    for _ in range(num_rounds):
        answers = [serve(model, draft, way[1], prompts, taken[way]) for way, draft in ways.items()]
        assert all(each == answers[0] for each in answers), "drafts have changed an answer"
    plain = min(taken["no draft model", 0].seconds)
    for (what, count), each in taken.items():
        print(f"{name:10} {what:18} {count} drafts: {each.summary(num_sequences * NUM_NEW, plain)}")


def main() -> None:
    """Measure all targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    measure("random", make_model(), given.rounds, given.sequences)
    measure("trained", load_trained(), given.rounds, given.sequences)
    measure("agreeing", make_agreeing(), given.rounds, given.sequences)


if __name__ == "__main__":
    main()
