"""Decode steps of hybrids, and of an indexer's model, on one GPU, by graphs and call by call; random weights.

    python -m benchmarks.engine.hybrids_on_gpu [--rows 1 16] [--models falcon_h1 ...] [--json FILE]

Prompts of 64 tokens that share nothing are computed; then all decode 64 tokens more, and these steps are timed. The
kernels of ten further steps are summed by torch's profiler. Shapes are those of Falcon-H1-1.5B, LFM2-1.2B, twelve
layers of Qwen3-Next-80B-A3B with 64 of its experts, and a narrow DeepSeek V3.2 whose indexer selects 64 tokens.
"""

import argparse
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.machine import describe
from pagedkv.engine import LLM, EngineConfig, SamplingParams

PROMPT: Final = 64
NUM_NEW: Final = 96
TIMED: Final = 64
PROFILED: Final = 10
KV_NBYTES: Final = 48 * 2**30
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "falcon_h1": {
        "vocab_size": 65537,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
    },
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if layer in {2, 5, 8, 10, 12, 14} else "conv" for layer in range(16)],
    },
    "qwen3_next": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 64,
    },
    "deepseek_v32": {
        "vocab_size": 129280,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "mlp_layer_types": ["dense", *["sparse"] * 11],
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "index_n_heads": 32,
        "index_topk": 64,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 768,
    },
}


@dataclass(frozen=True)
class Decoded:
    """What one engine did.

    Args:
        model, way: "graphs" or "plain"; num_rows: sequences.
        step_ms: a decode step, the median; kernels_ms: the sum of its kernels; num_kernels: how many.
        refusal: why steps were not replayed.
    """

    model: str
    way: str
    num_rows: int
    step_ms: float
    kernels_ms: float
    num_kernels: float
    refusal: str | None


def decode(llm: LLM, model: str, way: str, num_rows: int) -> Decoded:
    """Let as many sequences decode together; time their steps, then sum their kernels."""
    generator = torch.Generator().manual_seed(num_rows)
    prompts = torch.randint(5, SHAPES[model]["vocab_size"], (num_rows, PROMPT), generator=generator).tolist()
    llm.submit(prompts, SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))
    steps: list[float] = []
    while len(steps) < TIMED:
        begun = perf_counter()
        record = llm.step()
        seconds = perf_counter() - begun
        if record.num_decoded == num_rows and not record.num_prefilled:
            steps.append(seconds)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(PROFILED):
            llm.step()
        torch.cuda.synchronize()
    kernels = [event.device_time for event in profile.events() if event.device_time > 0]
    for request in list(llm.core.requests):
        llm.core.abort(request)
    refusal = llm.core.capture_state.refusal
    kernels_ms = sum(kernels) / 1e3 / PROFILED
    return Decoded(model, way, num_rows, 1e3 * median(steps[8:]), kernels_ms, len(kernels) / PROFILED, refusal)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--models", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--ways", choices=("graphs", "plain"), nargs="+", default=["graphs", "plain"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: list[Decoded] = []
    print("model         way     rows  ms a step  kernels, ms  of kernels  kernels")
    for name in given.models:
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **SHAPES[name], max_position_embeddings=4096, dtype=torch.bfloat16)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for way in given.ways:
            most = max(given.rows)
            llm = LLM(
                model,
                EngineConfig(
                    kv_nbytes=KV_NBYTES,
                    max_sequences=most,
                    max_batched_tokens=2048,
                    max_tokens=1024,
                    accept_differences=True,
                    capture_steps=way == "graphs",
                ),
            )
            decode(llm, name, way, given.rows[0])  # compiles kernels, proves graphs
            for rows in given.rows:
                found.append(each := decode(llm, name, way, rows))
                print(
                    f"{name:12s}  {way:6s}  {rows:4d}  {each.step_ms:9.2f}  {each.kernels_ms:11.2f}  "
                    f"{each.step_ms / each.kernels_ms:10.2f}  {each.num_kernels:7.0f}  {each.refusal or ''}",
                    flush=True,
                )
            del llm
            gc.collect()
            torch.cuda.empty_cache()
        del model
    if given.json is not None:
        rows = {"machine": describe(), "gpu": torch.cuda.get_device_name(), "rows": [asdict(each) for each in found]}
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
