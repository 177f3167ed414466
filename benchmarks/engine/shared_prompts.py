"""Time to the first token of prompts that come at once and share a prefix, on a GPU: the shape of an 8B Llama.

    python -m benchmarks.engine.shared_prompts [--prompts 64] [--tokens 2048] [--shared 0.75] [--rounds 3]

The same prompts are served with and without prefix caching, in turn, by engines whose kernels ran before. Without
caching every token of every prompt is computed. The means are of all prompts, from the moment they are submitted.
"""

import argparse
import gc
from statistics import mean, median
from time import perf_counter
from typing import Final

import torch

from benchmarks.engine.on_gpu import VOCABULARY, make_model
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.probe import compat

MAX_BATCHED: Final = 8192


def prompts_of(num_prompts: int, num_tokens: int, num_shared: int, seed: int) -> list[list[int]]:
    """Draw prompts that begin with the same tokens, and continue with their own."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(5, VOCABULARY, (num_shared,), generator=generator).tolist()
    own = torch.randint(5, VOCABULARY, (num_prompts, num_tokens - num_shared), generator=generator).tolist()
    return [shared + each for each in own]


def first_tokens_s(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Submit all prompts at once; return the seconds until each has its first token."""
    torch.cuda.synchronize()
    begun = perf_counter()
    requests = llm.submit(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    seconds: dict[int, float] = {}
    while llm.core.has_work:
        llm.step()
        seconds |= {
            each.number: perf_counter() - begun for each in requests if each.is_finished and each.number not in seconds
        }
    return list(seconds.values())


def engine_of(model: compat.Model, num_prompts: int, num_tokens: int, *, shares: bool) -> LLM:
    """Build an engine with room for all prompts."""
    num_blocks = num_prompts * (num_tokens // 16 + 2) + 64
    config = EngineConfig(
        num_blocks=num_blocks,
        max_sequences=num_prompts,
        max_batched_tokens=MAX_BATCHED,
        prefix_caching=shares,
        self_test=False,
        capture_steps=False,
    )
    return LLM(model, config)


def main() -> None:
    """Measure in turn, and print the means and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--shared", type=float, default=0.75)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="all of the shape's unless given")
    given = parser.parse_args()
    model = make_model("llama", given.layers)
    num_shared = int(given.shared * given.tokens)
    engines = {shares: engine_of(model, given.prompts, given.tokens, shares=shares) for shares in (False, True)}
    means: dict[bool, list[float]] = {False: [], True: []}
    for number in range(given.rounds + 1):  # the first round is a rehearsal
        for shares, llm in engines.items():
            seconds = first_tokens_s(llm, prompts_of(given.prompts, given.tokens, num_shared, seed=number))
            assert len(seconds) == given.prompts
            if number:
                means[shares].append(mean(seconds))
        gc.collect()
    without, shared = median(means[False]), median(means[True])
    ratio = f"{shared / without:.2f}"
    print(f"{given.prompts} prompts of {given.tokens} tokens, {num_shared} shared, on {torch.cuda.get_device_name()}")
    print(f"mean time to the first token: {without:.3f} s without sharing, {shared:.3f} s with it: {ratio}")


if __name__ == "__main__":
    main()
