"""Streams beside ``LLM.generate`` on a GPU: tokens per second of the shape of an 8B Llama, random weights.

    python -m benchmarks.server.on_gpu [--layers 32] [--streams 256] [--tokens 384] [--ways WAY ...] [--json FILE]

The engine has a process of its own, or the server's. Prompts have some 400 tokens, and hit what earlier turns computed;
the first turn is left out. Means of two turns, in which both ways take turns.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import describe
from benchmarks.server.prompts import draw_prompts
from benchmarks.server.serving import PORT, loop_s, serving
from benchmarks.server.streams import body_of, stream_all
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.engine.demo.trained import FOLDER
from pagedkv.engine.loading import load
from pagedkv.engine.prompts import chat_token_ids

VOCABULARY: Final = 288
GIB: Final = 16
WAYS: Final = {
    "own process": (),
    "own process, overlap": ("--overlap",),
    "one process, overlap": ("--overlap", "--one-process"),
}


@contextmanager
def saved_model(num_layers: int) -> Iterator[str]:
    """Save a model with the demonstration's tokenizer to a folder; yield its path."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(FOLDER / name, folder)
        del model
        torch.cuda.empty_cache()
        yield folder


def compare(folder: str, num_streams: int, num_tokens: int, options: Sequence[str]) -> dict[str, float]:
    """Serve streams, and generate the same tokens without a server."""
    prompts = draw_prompts(num_streams)
    overlap = "--no-overlap" not in options
    config = EngineConfig(
        kv_nbytes=GIB * 2**30, max_sequences=num_streams, self_test=False, leases=True, overlap=overlap
    )
    model, tokenizer = load(folder, "bfloat16", "cuda")
    llm = LLM(model, config, tokenizer=tokenizer)
    chats = [chat_token_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [body_of(prompt, num_tokens, stream=True) for prompt in prompts]
    own, streamed, loop = [], [], []
    limits = ("--memory", str(GIB), "--max-sequences", str(num_streams), "--max-waiting", "1024")
    with serving(folder, "--name", "demo", "--device", "cuda", "--dtype", "bfloat16", *limits, *options) as process:
        for turn in range(3):
            begun = time.perf_counter()
            llm.generate(chats, params)
            own_s = time.perf_counter() - begun
            begun, loop_begun = time.perf_counter(), loop_s(process)
            responses = asyncio.run(stream_all(PORT, requests, num_streams))
            streamed_s = time.perf_counter() - begun
            if turn:
                own.append(own_s)
                streamed.append(streamed_s)
                loop.append((loop_s(process) - loop_begun) / sum(each.num_chunks for each in responses) * 1e6)
    llm.close()
    num = num_streams * num_tokens
    return {
        "generate_tokens_s": num / statistics.fmean(own),
        "streams_tokens_s": num / statistics.fmean(streamed),
        "ratio": statistics.fmean(own) / statistics.fmean(streamed),
        "loop_us_a_chunk": statistics.fmean(loop),
    }


def main() -> None:
    """Measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = {}
    with saved_model(arguments.layers) as folder:
        for way in arguments.ways:
            figures[way] = compare(folder, arguments.streams, arguments.tokens, WAYS[way])
            torch.cuda.empty_cache()
            print(way, {name: round(value, 3) for name, value in figures[way].items()}, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "gpu": torch.cuda.get_device_name(), **figures}))


if __name__ == "__main__":
    main()
