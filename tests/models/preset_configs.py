"""The configs that presets are made of, and how: ``python -m tests.models.preset_configs`` asks their classes anew.

It writes ``src/pagedkv/models/presets.json``: what :func:`pagedkv.probe.sizing.memory_of` finds for each. A test holds
the file against it. Configs are those of the repositories named; a model with doubtful facts is left out.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pagedkv
from pagedkv.models.config import ModelConfig
from pagedkv.models.memory import ModelMemory
from pagedkv.probe import compat
from pagedkv.probe.sizing import memory_of
from tests.models.published import KEPT, Config, sized

__all__ = ["PRESET_CONFIGS", "recorded"]

PATH: Final = Path(pagedkv.__file__).parent / "models" / "presets.json"


def _opt(layers: int, hidden: int, heads: int) -> Config:
    return sized("opt", layers, hidden, heads, heads, ffn_dim=4 * hidden, word_embed_proj_dim=hidden) | {
        "torch_dtype": "float16",
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
    }


def _dense(model_type: str, *layers: int, sizes: tuple[int, int, int], **others: object) -> Config:
    vocab, intermediate, longest = sizes
    return (
        sized(model_type, *layers)
        | others
        | {
            "vocab_size": vocab,
            "intermediate_size": intermediate,
            "max_position_embeddings": longest,
        }
    )


F16: Final = {"torch_dtype": "float16"}
PRESET_CONFIGS: Final[dict[str, tuple[str, Config]]] = {
    "opt-13b": ("facebook/opt-13b", _opt(40, 5120, 40)),
    "opt-66b": ("facebook/opt-66b", _opt(64, 9216, 72)),
    "llama-2-7b": (
        "meta-llama/Llama-2-7b-hf",
        _dense("llama", 32, 4096, 32, 32, sizes=(32_000, 11_008, 4096)) | F16,
    ),
    "llama-2-13b": (
        "meta-llama/Llama-2-13b-hf",
        _dense("llama", 40, 5120, 40, 40, sizes=(32_000, 13_824, 4096)) | F16,
    ),
    "llama-2-70b": (
        "meta-llama/Llama-2-70b-hf",
        _dense("llama", 80, 8192, 64, 8, sizes=(32_000, 28_672, 4096)) | F16,
    ),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", _dense("llama", 32, 4096, 32, 8, sizes=(128_256, 14_336, 131_072))),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", _dense("llama", 80, 8192, 64, 8, sizes=(128_256, 28_672, 131_072))),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        _dense("llama", 126, 16_384, 128, 8, sizes=(128_256, 53_248, 131_072)),
    ),
    "mistral-7b-v0.1": (
        "mistralai/Mistral-7B-v0.1",
        _dense("mistral", 32, 4096, 32, 8, sizes=(32_000, 14_336, 32_768), sliding_window=4096),
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        _dense("mixtral", 32, 4096, 32, 8, sizes=(32_000, 14_336, 32_768), num_local_experts=8, num_experts_per_tok=2),
    ),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", _dense("qwen2", 28, 3584, 28, 4, sizes=(152_064, 18_944, 131_072))),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", _dense("qwen2", 80, 8192, 64, 8, sizes=(152_064, 29_568, 131_072))),
    "qwen3-32b": ("Qwen/Qwen3-32B", _dense("qwen3", 64, 5120, 64, 8, sizes=(151_936, 25_600, 40_960), head_dim=128)),
    "gemma-2-27b": (
        "google/gemma-2-27b",
        _dense("gemma2", 46, 4608, 32, 16, sizes=(256_000, 36_864, 8192), head_dim=128, sliding_window=4096),
    ),
    "jamba-v0.1": ("ai21labs/Jamba-v0.1", KEPT["Jamba-Mini-1.7"][0]),
    **{
        name: (source, KEPT[published][0])
        for name, source, published in (
            ("qwen3-8b", "Qwen/Qwen3-8B", "Qwen3-8B"),
            ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
            ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "Qwen3-235B-A22B"),
            ("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B"),
            ("qwen3.5-27b", "Qwen/Qwen3.5-27B", "Qwen3.5-27B"),
            ("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B"),
            ("qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B", "Qwen3.5-397B-A17B"),
            ("gemma-3-27b", "google/gemma-3-27b-it", "gemma-3-27b"),
            ("gemma-4-26b-a4b", "google/gemma-4-26B-A4B-it", "gemma-4-26b-a4b"),
            ("gemma-4-31b", "google/gemma-4-31B-it", "gemma-4-31b"),
            ("gpt-oss-20b", "openai/gpt-oss-20b", "gpt-oss-20b"),
            ("gpt-oss-120b", "openai/gpt-oss-120b", "gpt-oss-120b"),
            ("deepseek-v3", "deepseek-ai/DeepSeek-V3", "DeepSeek-V3"),
            ("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2", "DeepSeek-V3.2"),
            ("deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash", "DeepSeek-V4-Flash"),
            ("kimi-k2", "moonshotai/Kimi-K2-Instruct", "Kimi-K2"),
            ("kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct", "Kimi-Linear"),
            ("glm-4.5", "zai-org/GLM-4.5", "GLM-4.5"),
            ("glm-4.7-flash", "zai-org/GLM-4.7-Flash", "GLM-4.7-Flash"),
            ("glm-5", "zai-org/GLM-5", "GLM-5"),
            ("minimax-m2", "MiniMaxAI/MiniMax-M2", "MiniMax-M2"),
            ("mimo-v2-flash", "XiaomiMiMo/MiMo-V2-Flash", "MiMo-V2-Flash"),
            ("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E", "Llama-4-Scout"),
            ("llama-4-maverick", "meta-llama/Llama-4-Maverick-17B-128E", "Llama-4-Maverick"),
            ("ministral-3-8b", "mistralai/Ministral-3-8B-Instruct-2512", "Ministral-3-8B"),
            ("nemotron-3-nano-30b-a3b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", "NVIDIA-Nemotron-3-Nano-30B-A3B"),
            ("longcat-flash", "meituan-longcat/LongCat-Flash-Chat", "LongCat-Flash"),
            ("falcon-h1-7b", "tiiuae/Falcon-H1-7B-Instruct", "Falcon-H1-7B"),
        )
    },
}
"""By the preset's name: a repository on the Hugging Face hub, and the keys of its config.json that matter."""


def recorded(name: str) -> dict[str, object]:
    """Ask the class of a preset's config: its entry in the file."""
    source, config = PRESET_CONFIGS[name]
    memory: ModelMemory = memory_of(name, ModelConfig(source, config))
    return {"source": source, **asdict(memory)}


if __name__ == "__main__":
    compat.be_silent()
    PATH.write_text(json.dumps({name: recorded(name) for name in sorted(PRESET_CONFIGS)}, indent=1) + "\n")
