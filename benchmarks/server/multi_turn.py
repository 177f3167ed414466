"""vLLM's multi-turn client against this server and ``transformers serve``, one after the other, on a GPU.

    python -m benchmarks.server.multi_turn CLIENT [--layers 32] [--hidden 4096] [--conversations 48] [--json FILE]

CLIENT is the folder ``benchmarks/multi_turn`` of vLLM's sources (it was run with 0.33's); its client runs in processes
of its own and needs aiohttp, pandas, tqdm, xlsxwriter, and of ``vllm`` one function that hides secrets in its log, for
which ``PYTHONPATH`` may lead to a stand-in. The model has the shape of Llama 3 8B with a vocabulary of 4,000, random
weights in bfloat16, and a tokenizer trained on docs/.

Conversations are those of coding agents in shape: all begin with the same 2,000 tokens (tools and rules), each has some
6,000 of its own (files), then 8 to 12 turns of 250 to 350 tokens with answers of 64. A client sends the next turn of a
conversation when the last has been answered. Both servers have blocks for as many tokens, and steps of as many.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.machine import describe
from benchmarks.markdown import table
from benchmarks.repository import ROOT
from benchmarks.server.agentx import PORT, Server, running

VOCABULARY: Final = 4000
POSITIONS: Final = 32_768
BLOCK_SIZE: Final = 32
NUM_TOKENS: Final = 400_000
BATCHED_TOKENS: Final = 2048
NUM_CLIENTS: Final = 16
TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MOST_CHARACTERS: Final = 17_000 * 4
"""Of a conversation."""
PATIENCE_S: Final = 600


@dataclass(frozen=True, slots=True)
class Figures:
    """What the client says of one server: milliseconds, medians but for ``first_slow_ms``, the 90th percentile.

    ``seconds`` is the whole run of the client, its own start included; ``failure`` is its last line where it failed.
    """

    server: str
    requests: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_ms: float = 0.0
    first_slow_ms: float = 0.0
    token_ms: float = 0.0
    failure: str | None = None


@contextmanager
def saved_model(layers: int, hidden: int) -> Iterator[Path]:
    """Save a model of random weights with a tokenizer to a folder; yield its path."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<system>", "<user>", "<assistant>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    trained.train([str(page) for page in sorted((ROOT / "docs").glob("*.md"))], trainer)
    tokenizer = cast("Any", PreTrainedTokenizerFast)(tokenizer_object=trained, chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"})
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield Path(folder)


def servers_of(model: Path) -> Iterator[Server]:
    """Name both servers."""
    where = ("--port", str(PORT))
    blocks = str(NUM_TOKENS // BLOCK_SIZE)
    yield Server(
        "pagedkv",
        (
            *(sys.executable, "-m", "pagedkv", "serve", str(model), *where, "--dtype", "bfloat16"),
            *("--block-size", str(BLOCK_SIZE), "--num-blocks", blocks, "--max-batched-tokens", str(BATCHED_TOKENS)),
        ),
        model.name,
    )
    yield Server(
        "transformers serve",
        (
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--host", "127.0.0.1"),
            *(*where, "--dtype", "bfloat16", "--continuous-batching", "--cb-block-size", str(BLOCK_SIZE)),
            *("--cb-num-blocks", blocks, "--cb-max-batch-tokens", str(BATCHED_TOKENS)),
        ),
        str(model),
    )


def conversations(number: int) -> dict[str, Any]:
    """Write the client's settings of the conversations."""
    return {
        "filetype": "generate_conversations",
        "num_conversations": number,
        "text_files": ["text.txt"],
        "print_stats": False,
        "prompt_input": {
            "num_turns": {"distribution": "uniform", "min": 8, "max": 12},
            "common_prefix_num_tokens": {"distribution": "constant", "value": 2000},
            "prefix_num_tokens": {"distribution": "lognormal", "average": 6000, "max": 12_000},
            "num_tokens": {"distribution": "uniform", "min": 250, "max": 350},
        },
        "prompt_output": {"num_tokens": {"distribution": "constant", "value": 64}},
    }


def measure(server: Server, model: Path, client: Path, number: int, results: Path) -> Figures:
    """Run a server and the client against it."""
    results.mkdir(parents=True, exist_ok=True)
    name = server.name.replace(" ", "-")
    (results / "text.txt").write_text(
        " ".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    )
    (results / "conversations.json").write_text(json.dumps(conversations(number)))
    stats = results / f"{name}.json"
    command = [
        *(sys.executable, str(client / "benchmark_serving_multi_turn.py"), "--model", str(model)),
        *("--served-model-name", server.model, "--url", f"http://127.0.0.1:{PORT}"),
        *("--input-file", "conversations.json", "--num-clients", str(NUM_CLIENTS)),
        *("--max-active-conversations", str(number), "--seed", "1", "--stats-json-output", str(stats.resolve())),
        "--no-early-stop",
    ]
    path = os.pathsep.join([str(client), os.environ.get("PYTHONPATH", "")])
    with running(server, results / f"{name}.server.log"), (results / f"{name}.client.log").open("wb") as output:
        begun = perf_counter()
        try:
            subprocess.run(
                command,
                cwd=results,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                timeout=PATIENCE_S,
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
            return Figures(server.name, seconds=perf_counter() - begun, failure=str(problem)[-200:])
        seconds = perf_counter() - begun
    answered = json.loads(stats.read_text())
    first = [each["ttft_ms"] for each in answered]
    return Figures(
        server=server.name,
        requests=len(answered),
        seconds=seconds,
        prompt_tokens=sum(each["input_num_tokens"] for each in answered),
        output_tokens=sum(each["output_num_tokens"] for each in answered),
        first_ms=median(first),
        first_slow_ms=quantiles(first, n=10)[-1],
        token_ms=median(each["tpot_ms"] for each in answered),
    )


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", type=Path, metavar="CLIENT")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--only", nargs="+", metavar="SERVER")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "multi_turn", metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    with saved_model(given.layers, given.hidden) as model:
        for server in servers_of(model):
            if given.only and server.name not in given.only:
                continue
            found.append(measure(server, model, given.client.resolve(), given.conversations, given.results))
            print(found[-1], flush=True)
    print(
        table(
            (
                "",
                "requests",
                "seconds",
                "prompt tokens",
                "output tokens",
                "first token, ms",
                "p90",
                "between tokens, ms",
            ),
            *(
                (
                    *(each.server, each.requests, f"{each.seconds:.1f}", f"{each.prompt_tokens:,}"),
                    *(f"{each.output_tokens:,}", f"{each.first_ms:.0f}", f"{each.first_slow_ms:.0f}"),
                    f"{each.token_ms:.1f}",
                )
                for each in found
            ),
        )
    )
    if given.json is not None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        document = {"machine": describe(), "gpu": gpu, "servers": [asdict(each) for each in found]}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
