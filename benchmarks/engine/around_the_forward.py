"""What surrounds the forward pass: its share of a step, at 64 sequences that decode with the demonstration's model.

    python -m benchmarks.engine.around_the_forward [--rounds 5] [--sequences 64]

64 prompts of 48 tokens, half of which share 32, are answered together; steps in which all of them decode are taken
apart by their records: medians of the fastest tenth, since other work on the machine makes steps slower and
none faster.
"""

import argparse
from statistics import median
from typing import Final

import torch
import transformers

from pagedkv.engine import LLM, EngineConfig, SamplingParams, StepRecord
from pagedkv.engine.demo.trained import load_trained
from pagedkv.probe import compat

PARTS: Final = ("schedule", "forward", "sample", "finish")
NUM_NEW: Final = 128


def run_round(model: compat.Model, num_sequences: int) -> list[tuple[float, ...]]:
    """Serve once; return the seconds of each part of every step in which all decode."""
    llm = LLM(model, EngineConfig(num_blocks=2000, max_sequences=num_sequences, self_test=False))
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(2, compat.vocabulary_size(model), (num_sequences + 1, 48), generator=generator).tolist()
    prompts = [drawn[-1][:32] + own[:16] if place % 2 else own for place, own in enumerate(drawn[:-1])]
    llm.submit(prompts, SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))
    records: list[StepRecord] = []
    while llm.core.has_work:
        records.append(llm.step())
    whole = [record for record in records if record.num_decoded == num_sequences and not record.num_prefilled]
    return [tuple(getattr(record, f"{part}_seconds") for part in PARTS) for record in whole]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=64)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = load_trained()
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    run_round(model, given.sequences)  # compiles
    steps = sorted((step for _ in range(given.rounds) for step in run_round(model, given.sequences)), key=sum)
    fastest = steps[: max(1, len(steps) // 10)]
    medians = {part: median(step[place] for step in fastest) for place, part in enumerate(PARTS)}
    total = sum(medians.values())
    for part, seconds in {**medians, "around the forward": total - medians["forward"]}.items():
        print(f"{part:20} {seconds * 1e6:10,.0f} us {seconds / total:8.1%}")


if __name__ == "__main__":
    main()
