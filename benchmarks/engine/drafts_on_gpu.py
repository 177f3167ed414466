"""Decode steps of an 8B shape on a GPU, with a draft model and without, its passes as graphs and call by call.

    python -m benchmarks.engine.drafts_on_gpu [--rows 1 8 64] [--shares 0 0.02] [--layers 2] [--json FILE]

The target has random weights in bfloat16, and its layers behind the first ones add little to what these have found: a
share of what they would. The draft model is a copy of the first ones, so a share of 0 makes it right always, and more
makes it right less often. Prompts of 128 tokens, 128 new ones, the most likely; seconds of the whole, best of two
rounds after one that proves the graphs. Answers may differ in near ties, since sizes of steps round differently.
"""

import argparse
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import torch

from benchmarks.engine.drafts import first_layers
from benchmarks.engine.guessing import Taken, Tokens, serve_counted
from benchmarks.engine.on_gpu import VOCABULARY, make_model
from benchmarks.machine import describe
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.probe import compat

NUM_PROMPT: Final = 128
NUM_NEW: Final = 128
NUM_DRAFT_TOKENS: Final = (2, 4)
PARAMS: Final = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


@dataclass(frozen=True)
class Drafted:
    """What one engine did.

    Args:
        num_rows: sequences; share: of what later layers add; num_drafts: for each row in a step; 0: no draft model.
        are_graphs: whether the draft model's passes were replayed.
        tokens_per_s: of the best round, prompts included; num_steps: of it.
        right: drafts that were accepted; equal: answers equal to those without drafts, both as shares.
    """

    num_rows: int
    share: float
    num_drafts: int
    are_graphs: bool
    tokens_per_s: float
    num_steps: int
    right: float
    equal: float


def make_agreeing(share: float, num_layers: int) -> compat.Model:
    """Make an 8B shape whose layers behind the first ones change little."""
    model = cast("Any", make_model("llama", None))
    with torch.no_grad():
        for layer in model.model.layers[num_layers:]:
            layer.self_attn.o_proj.weight.mul_(share)
            layer.mlp.down_proj.weight.mul_(share)
    return cast("compat.Model", model)


def serve(
    model: compat.Model, draft: compat.Model | None, num_drafts: int, num_rows: int, *, are_graphs: bool = True
) -> tuple[Taken, Tokens]:
    """Serve three rounds in one engine; return the last two, and the answers."""
    config = EngineConfig(
        num_blocks=num_rows * (NUM_PROMPT + NUM_NEW + 32) // 16 + 64,
        max_sequences=num_rows,
        max_batched_tokens=8192,
        max_tokens=2048,
        self_test=False,
        num_draft_tokens=num_drafts,
    )
    llm = LLM(model, config, draft_model=draft)
    drafter = llm.core._parts.drafter  # noqa: SLF001 - there is no other way to it
    if drafter is not None and not are_graphs:
        drafter._buffers = None  # noqa: SLF001 - as above
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(5, VOCABULARY, (num_rows, NUM_PROMPT), generator=generator).tolist()
    taken = Taken()
    answers: Tokens = []
    for _ in range(3):
        llm.reset_prefix_cache()
        answers = serve_counted(llm, prompts, PARAMS, perf_counter, taken)
    del taken.seconds[0]
    return taken, answers


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.02])
    parser.add_argument("--layers", type=int, default=2, help="of the draft model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    results: list[Drafted] = []
    for share in given.shares:
        model = make_agreeing(share, given.layers)
        draft = first_layers(model, given.layers)
        for num_rows in given.rows:
            plain: Tokens = []
            ways = [(0, True), *((count, True) for count in NUM_DRAFT_TOKENS), (NUM_DRAFT_TOKENS[-1], False)]
            for num_drafts, are_graphs in ways:
                taken, answers = serve(
                    model, draft if num_drafts else None, num_drafts, num_rows, are_graphs=are_graphs
                )
                plain = plain or answers
                results.append(
                    Drafted(
                        num_rows,
                        share,
                        num_drafts,
                        are_graphs,
                        num_rows * NUM_NEW / min(taken.seconds),
                        taken.num_steps,
                        taken.num_accepted / taken.num_drafted if taken.num_drafted else 0.0,
                        sum(a == b for a, b in zip(plain, answers, strict=True)) / num_rows,
                    )
                )
                print(results[-1], flush=True)
                gc.collect()
                torch.cuda.empty_cache()
        del model, draft
        gc.collect()
        torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(
            json.dumps({"machine": describe(), "served": [asdict(each) for each in results]}, indent=2)
        )


if __name__ == "__main__":
    main()
