"""Returning conversations with tiers and without: time to first token, and tokens a second.

    python -m benchmarks.engine.tiers [--rounds 5] [--ways none host folder redis] [--redis URL] [--folder PATH]
    python -m benchmarks.engine.tiers --gpu              # the shape of an 8B Llama, four prompts of 16,384 tokens
    python -m benchmarks.engine.tiers --small-gpu        # the small model, on a GPU

Conversations have three times as many tokens as the device pool. Each is served once, so that others evict its blocks;
when all are stored, each returns with its answer and a further question. Rounds take turns; each begins with empty
tiers. On a CPU all answers must be those of the engine without tiers. On a GPU they are not compared: of random weights
in bfloat16 many logits are equal, and what wins depends on the shapes of products, so also on hits without tiers.
"""

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, TypeAlias, cast

import torch

from benchmarks.engine.on_gpu import VOCABULARY as LARGE_VOCABULARY, make_model as make_large_model
from benchmarks.engine.small_model import VOCABULARY, make_model
from benchmarks.machine import describe
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.probe import compat
from pagedkv.tiers import FolderTier, HostTier, RedisTier, Tier

Tokens: TypeAlias = list[int]

BLOCK_SIZE: Final = 16
NUM_NEW: Final = 16
NUM_QUESTION_TOKENS: Final = 40


@dataclass(frozen=True, slots=True)
class Setting:
    """What is served.

    Args:
        model: the model; lengths: tokens of the first prompt of each conversation.
        vocabulary: token ids are below it; tier_nbytes: size of a tier.
    """

    model: compat.Model
    lengths: Sequence[int]
    vocabulary: int
    tier_nbytes: str

    @property
    def num_blocks(self) -> int:
        """A third of what all conversations take, and the longest one at least."""
        of_all = sum(self.lengths) // 3
        longest = max(self.lengths) + 2 * (NUM_NEW + NUM_QUESTION_TOKENS)
        return max(of_all, longest + 4 * BLOCK_SIZE) // BLOCK_SIZE + 1


@dataclass(slots=True)
class Measured:
    """What one way took, a number a round."""

    first_token_s: list[float] = field(default_factory=list)
    asked_tokens_per_s: list[float] = field(default_factory=list)
    returned_tokens_per_s: list[float] = field(default_factory=list)
    hit_ratio: list[float] = field(default_factory=list)


def small(device: str) -> Setting:
    """Build the Llama of the other benchmarks of the engine, with conversations of 1,000 to 4,000 tokens."""
    model = cast("compat.Model", make_model(8192).to(device))  # type: ignore[arg-type]  # torch's Module.to
    return Setting(model, [1000 + 3000 * (7 * place % 18) // 17 for place in range(18)], VOCABULARY, "4GiB")


def large() -> Setting:
    """Build the shape of an 8B Llama on the GPU."""
    model = make_large_model("llama", None)
    cast("Any", model).config.max_position_embeddings = 32_768
    return Setting(model, [16_384] * 4, LARGE_VOCABULARY, "32GiB")


def draw(num_tokens: int, vocabulary: int, seed: int) -> Tokens:
    """Draw token ids."""
    return torch.randint(5, vocabulary, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def serve(setting: Setting, tiers: Sequence[Tier], measured: Measured) -> list[Tokens]:
    """Serve all conversations twice, add the times to ``measured``, and return all answers."""
    llm = LLM(
        setting.model,
        EngineConfig(
            num_blocks=setting.num_blocks,
            max_sequences=8,
            max_batched_tokens=8192 if setting.vocabulary == LARGE_VOCABULARY else 2048,
            max_tokens=max(setting.lengths) + 1024,
            self_test=False,
            tiers=tuple(tiers),
        ),
    )
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    prompts = [draw(length, setting.vocabulary, seed) for seed, length in enumerate(setting.lengths)]
    answers, seconds = ask(llm, prompts, params)
    measured.asked_tokens_per_s.append(sum(map(len, prompts)) / seconds)
    answers_of_all = [*answers]
    llm.flush_tiers()
    first_token_s, num_hits, num_tokens = [], 0, 0
    for turn in range(2):
        prompts = [
            [*prompt, *answer, *draw(NUM_QUESTION_TOKENS, setting.vocabulary, 1000 * turn + seed)]
            for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        num_tokens += sum(map(len, prompts))
        if turn == 0:  # one after the other
            answers = []
            for prompt in prompts:
                begun = perf_counter()
                (request,) = llm.submit([prompt], params)
                while not request.samples[0].token_ids:
                    llm.step()
                first_token_s.append(perf_counter() - begun)
                while llm.core.has_work:
                    llm.step()
                num_hits += request.num_cached_tokens or 0
                answers.append(list(request.samples[0].token_ids))
        else:  # all at once
            answers, seconds = ask(llm, prompts, params)
            measured.returned_tokens_per_s.append(sum(map(len, prompts)) / seconds)
        answers_of_all += answers
    measured.first_token_s.append(median(first_token_s))
    measured.hit_ratio.append(num_hits / (num_tokens / 2))
    llm.close()
    return answers_of_all


def ask(llm: LLM, prompts: Sequence[Tokens], params: SamplingParams) -> tuple[list[Tokens], float]:
    """Serve prompts together; return their answers and the seconds."""
    begun = perf_counter()
    outputs = llm.generate(list(prompts), params)
    return [list(output.token_ids) for output in outputs], perf_counter() - begun


def main() -> None:
    """Take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["none", "host", "folder"])
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/0", help="an empty data base; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--small-gpu", action="store_true")
    parser.add_argument("--loads", choices=["if-faster", "always"], default="if-faster", help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    setting = large() if given.gpu else small("cuda" if given.small_gpu else "cpu")
    size = setting.tier_nbytes
    ways: dict[str, Callable[[Path], tuple[Tier, ...]]] = {
        "none": lambda _: (),
        "host": lambda _: (HostTier(size, loads=given.loads),),
        "folder": lambda folder: (FolderTier(folder, size, loads=given.loads),),
        "redis": lambda folder: (RedisTier(given.redis, size, prefix=folder.name, loads=given.loads),),
    }
    measured = {name: Measured() for name in given.ways}
    expected: list[Tokens] | None = None
    serve(setting, (), Measured())  # compiles, and warms caches
    for _ in range(given.rounds):
        for name in given.ways:
            with TemporaryDirectory(dir=given.folder) as folder:
                answers = serve(setting, ways[name](Path(folder)), measured[name])
            gc.collect()
            expected = answers if expected is None else expected
            assert given.gpu or answers == expected, f"with tiers {name!r} answers are others"
    columns = ("first token, ms", "asked, tokens/s", "returned, tokens/s", "hits")
    print(f"{'tiers':8} {columns[0]:>16} {columns[1]:>18} {columns[2]:>20} {columns[3]:>8}")
    base = measured.get("none")
    for name, each in measured.items():
        first, asked, returned = map(median, (each.first_token_s, each.asked_tokens_per_s, each.returned_tokens_per_s))
        print(f"{name:8} {1e3 * first:16.1f} {asked:18,.0f} {returned:20,.0f} {median(each.hit_ratio):8.3f}")
        if base is not None and base is not each:
            of_base = [
                median(a / b for a, b in zip(getattr(each, key), getattr(base, key), strict=True))
                for key in ("first_token_s", "asked_tokens_per_s", "returned_tokens_per_s")
            ]
            print(f"{'':8} {of_base[0]:16.2f} {of_base[1]:18.2f} {of_base[2]:20.2f}   of that without tiers")
    if given.json is not None:
        document = {"machine": describe(), "ways": {name: asdict(each) for name, each in measured.items()}}
        given.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
