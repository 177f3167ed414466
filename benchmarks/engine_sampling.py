"""Sampling a batch: our sampler beside transformers' processors applied row by row, on this machine's CPU or GPU.

What is compared is checked first: the greatest tokens, and the tokens that each filter keeps. Logits are random, in two
shapes: *peaked*, with a few tokens far above the others as trained models have them, and *flat*, where
top-p keeps a third of the vocabulary.

Theirs are measured on 16 rows, and multiplied: row by row each takes what it takes.

    python -m benchmarks.engine_sampling --json out/sampling.json
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from transformers.generation import logits_process as theirs

from benchmarks.machine import describe
from benchmarks.measure import timed
from pagedkv.engine.sampling import BatchSampler, Place, SampledSequence, SamplingParams
from pagedkv.engine.sampling.drawing import tiled
from pagedkv.engine.sampling.sampler import Adjustment, features_of, kept_least

PROMPT_TOKENS: Final = 512
ANSWER_TOKENS: Final = 128
ROWS_OF_THEIRS: Final = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """The parameters of all rows of a batch.

    Args:
        name: in the table; params: of ours; processors: the same of transformers.
        is_drawn: whether a token is drawn, or the greatest taken.
    """

    name: str
    params: SamplingParams
    processors: tuple[theirs.LogitsProcessor, ...]
    is_drawn: bool


KINDS: Final = (
    Kind("greedy", SamplingParams(temperature=0), (), is_drawn=False),
    Kind("temperature", SamplingParams(temperature=0.8), (theirs.TemperatureLogitsWarper(0.8),), is_drawn=True),
    Kind("top-k 50", SamplingParams(temperature=1.0, top_k=50), (theirs.TopKLogitsWarper(50),), is_drawn=True),
    Kind(
        "temperature, top-p 0.9",
        SamplingParams(temperature=0.8, top_p=0.9),
        (theirs.TemperatureLogitsWarper(0.8), theirs.TopPLogitsWarper(0.9)),
        is_drawn=True,
    ),
    Kind(
        "min-p 0.05",
        SamplingParams(temperature=1.0, min_p=0.05),
        (theirs.MinPLogitsWarper(0.05),),
        is_drawn=True,
    ),
    Kind(
        "greedy, repetition penalty",
        SamplingParams(temperature=0, repetition_penalty=1.2),
        (theirs.RepetitionPenaltyLogitsProcessor(1.2),),
        is_drawn=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: milliseconds a batch, the best of the runs, and how many times faster ours is."""

    kind: str
    shape: str
    num_rows: int
    vocab_size: int
    ours_ms: float
    theirs_ms: float
    ratio: float


def main() -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_sampling", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/sampling.json"), metavar="FILE", help="where to write")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default 1)")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="batch sizes (default 64 256)")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 128_256], help="default 32000 128256")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = []
    print(f"{'what':<28} {'logits':<7} {'rows':>5} {'vocabulary':>10} {'ours ms':>9} {'theirs ms':>10} {'ratio':>7}")
    for figure in _figures(torch.device(arguments.device), arguments.rows, arguments.vocabulary):
        figures.append(figure)
        print(
            f"{figure.kind:<28} {figure.shape:<7} {figure.num_rows:>5} {figure.vocab_size:>10} {figure.ours_ms:>9.2f} "
            f"{figure.theirs_ms:>10.2f} {figure.ratio:>7.1f}",
            flush=True,
        )
    machine = describe() | {"torch": torch.__version__, "device": arguments.device, "threads": str(arguments.threads)}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "figures": [asdict(each) for each in figures]}
    arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _figures(device: torch.device, batch_sizes: list[int], vocab_sizes: list[int]) -> Iterator[Figure]:
    for vocab_size in vocab_sizes:
        for num_rows in batch_sizes:
            for shape in ("peaked", "flat"):
                logits = _logits(num_rows, vocab_size, shape).to(device)
                ids = torch.randint(vocab_size, (num_rows, PROMPT_TOKENS + ANSWER_TOKENS))
                for kind in KINDS:
                    yield _figure(kind, shape, logits, ids)


def _logits(num_rows: int, vocab_size: int, shape: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * (2 if shape == "peaked" else 1)
    if shape == "peaked":
        likely = torch.randint(vocab_size, (num_rows, 50), generator=generator)
        logits.scatter_add_(1, likely, torch.linspace(16, 8, 50).expand(num_rows, -1).contiguous())
    return logits


def _figure(kind: Kind, shape: str, logits: torch.Tensor, ids: torch.Tensor) -> Figure:
    num_rows, vocab_size = logits.shape
    sequences = [
        SampledSequence(
            kind.params,
            row[:PROMPT_TOKENS].numpy(),
            vocab_size=vocab_size,
            seed=index,
            generated_ids=row[PROMPT_TOKENS:].numpy(),
        )
        for index, row in enumerate(ids)
    ]
    places = [Place(sequence) for sequence in sequences]
    on_device = ids.to(logits.device)
    sampler = BatchSampler(vocab_size)
    _check(kind, logits[:8], places[:8], on_device[:8])

    def ours() -> list[int]:
        tokens: list[int] = sampler.sample(logits, places).token_ids.tolist()
        return tokens

    def row_by_row() -> list[int]:
        return [_their_token(kind, logits[row : row + 1], on_device[row : row + 1]) for row in range(ROWS_OF_THEIRS)]

    ours_ms, theirs_ms = _best_ms(ours), _best_ms(row_by_row) * num_rows / ROWS_OF_THEIRS
    return Figure(kind.name, shape, num_rows, vocab_size, ours_ms, theirs_ms, theirs_ms / ours_ms)


def _best_ms(run: Callable[[], object]) -> float:
    return timed(run, num_runs=3, num_warm_ups=1).best_us / 1000


def _their_scores(kind: Kind, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for processor in kind.processors:
        logits = processor(ids, logits)
    return logits


def _their_token(kind: Kind, logits: torch.Tensor, ids: torch.Tensor) -> int:
    scores = _their_scores(kind, logits, ids)
    if kind.is_drawn:
        return int(torch.multinomial(scores.softmax(dim=-1), 1))
    return int(scores.argmax())


def _check(kind: Kind, logits: torch.Tensor, places: list[Place], ids: torch.Tensor) -> None:
    """Refuse to measure what is not the same: scores that differ, tokens kept by one alone, but for a rounding mass."""
    scores = logits.clone()
    Adjustment(scores, places).apply(features_of(places))
    expected = torch.cat([_their_scores(kind, logits[row : row + 1], ids[row : row + 1]) for row in range(len(logits))])
    if not kind.is_drawn:
        assert torch.equal(scores, expected)
        return
    least = kept_least(tiled(scores), torch.arange(len(places), device=logits.device), places)
    is_kept, is_expected = scores >= least[:, None], expected > -torch.inf
    assert int((is_kept != is_expected).sum(dim=1).max()) <= max(2, int(is_expected.sum(dim=1).max()) // 1000)


if __name__ == "__main__":
    sys.exit(main())
