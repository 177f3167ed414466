"""The configs of well-known models: the facts that determine their memory.

Each preset is a config like any other and is read by the same reader. The facts are those of ``config.json`` in the
model's repository on the Hugging Face hub, named in ``source``; published numbers of weights stand beside them if the
config does not determine them. A model with doubtful facts is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pagedkv.models.memory import GIB

BILLION: Final = 10**9


@dataclass(frozen=True, slots=True)
class Preset:
    """One model.

    Args:
        source: source of the facts: a repository on the Hugging Face hub.
        config: the keys of its config.json that are used here.
        num_parameters: published number of weights, where it cannot be counted from the config.
        num_active_parameters: published number of weights that a token uses, likewise.
        weights_nbytes: published size of the checkpoint, where it is not the weights times the dtype.
    """

    source: str
    config: Mapping[str, object]
    num_parameters: int | None = None
    num_active_parameters: int | None = None
    weights_nbytes: int | None = None


_Facts = dict[str, object]


def _layers(num_layers: int, hidden: int, num_heads: int, num_kv_heads: int) -> _Facts:
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }


def _sizes(vocab: int, intermediate: int, max_context: int) -> _Facts:
    return {"vocab_size": vocab, "intermediate_size": intermediate, "max_position_embeddings": max_context}


def _experts(num_experts: int, num_used: int) -> _Facts:
    return {"num_local_experts": num_experts, "num_experts_per_tok": num_used}


def _opt(num_layers: int, hidden: int, num_heads: int) -> _Facts:
    return {
        "model_type": "opt",
        "torch_dtype": "float16",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": num_heads,
        "ffn_dim": 4 * hidden,
        "word_embed_proj_dim": hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


LLAMA_2: Final[_Facts] = {"model_type": "llama", "torch_dtype": "float16"}
LLAMA_3: Final[_Facts] = {"model_type": "llama", "torch_dtype": "bfloat16"}
MISTRAL: Final[_Facts] = {"model_type": "mistral", "torch_dtype": "bfloat16"}
MIXTRAL: Final[_Facts] = {"model_type": "mixtral", "torch_dtype": "bfloat16"}
QWEN_2: Final[_Facts] = {"model_type": "qwen2", "torch_dtype": "bfloat16", "use_sliding_window": False}
QWEN_3: Final[_Facts] = {
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "use_sliding_window": False,
}
GPT_OSS: Final[_Facts] = {
    "model_type": "gpt_oss",
    "torch_dtype": "bfloat16",
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "quantization_config": {"quant_method": "mxfp4"},
}

PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "opt-13b": Preset("facebook/opt-13b", _opt(40, 5120, 40)),
        "opt-66b": Preset("facebook/opt-66b", _opt(64, 9216, 72)),
        "llama-2-7b": Preset(
            "meta-llama/Llama-2-7b-hf", LLAMA_2 | _layers(32, 4096, 32, 32) | _sizes(32_000, 11_008, 4096)
        ),
        "llama-2-13b": Preset(
            "meta-llama/Llama-2-13b-hf", LLAMA_2 | _layers(40, 5120, 40, 40) | _sizes(32_000, 13_824, 4096)
        ),
        "llama-2-70b": Preset(
            "meta-llama/Llama-2-70b-hf", LLAMA_2 | _layers(80, 8192, 64, 8) | _sizes(32_000, 28_672, 4096)
        ),
        "llama-3.1-8b": Preset(
            "meta-llama/Llama-3.1-8B", LLAMA_3 | _layers(32, 4096, 32, 8) | _sizes(128_256, 14_336, 131_072)
        ),
        "llama-3.1-70b": Preset(
            "meta-llama/Llama-3.1-70B", LLAMA_3 | _layers(80, 8192, 64, 8) | _sizes(128_256, 28_672, 131_072)
        ),
        "llama-3.1-405b": Preset(
            "meta-llama/Llama-3.1-405B", LLAMA_3 | _layers(126, 16_384, 128, 8) | _sizes(128_256, 53_248, 131_072)
        ),
        "mistral-7b-v0.1": Preset(
            "mistralai/Mistral-7B-v0.1",
            MISTRAL | _layers(32, 4096, 32, 8) | _sizes(32_000, 14_336, 32_768) | {"sliding_window": 4096},
        ),
        "mixtral-8x7b": Preset(
            "mistralai/Mixtral-8x7B-v0.1",
            MIXTRAL | _layers(32, 4096, 32, 8) | _sizes(32_000, 14_336, 32_768) | _experts(8, 2),
        ),
        "qwen2.5-7b": Preset("Qwen/Qwen2.5-7B", QWEN_2 | _layers(28, 3584, 28, 4) | _sizes(152_064, 18_944, 131_072)),
        "qwen2.5-72b": Preset("Qwen/Qwen2.5-72B", QWEN_2 | _layers(80, 8192, 64, 8) | _sizes(152_064, 29_568, 131_072)),
        "qwen3-8b": Preset("Qwen/Qwen3-8B", QWEN_3 | _layers(36, 4096, 32, 8) | _sizes(151_936, 12_288, 40_960)),
        "qwen3-32b": Preset("Qwen/Qwen3-32B", QWEN_3 | _layers(64, 5120, 64, 8) | _sizes(151_936, 25_600, 40_960)),
        "qwen3-next-80b-a3b": Preset(
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            {
                "model_type": "qwen3_next",
                "torch_dtype": "bfloat16",
                "head_dim": 256,
                "full_attention_interval": 4,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "max_position_embeddings": 262_144,
            }
            | _layers(48, 2048, 16, 2)
            | _experts(512, 10),
            num_parameters=80 * BILLION,
            num_active_parameters=3 * BILLION,
        ),
        "gemma-2-27b": Preset(
            "google/gemma-2-27b",
            {"model_type": "gemma2", "torch_dtype": "bfloat16", "head_dim": 128, "sliding_window": 4096}
            | _layers(46, 4608, 32, 16)
            | _sizes(256_000, 36_864, 8192),
        ),
        "gemma-3-27b": Preset(
            "google/gemma-3-27b-it",
            {"model_type": "gemma3_text", "torch_dtype": "bfloat16", "head_dim": 128, "sliding_window": 1024}
            | _layers(62, 5376, 32, 16)
            | _sizes(262_208, 21_504, 131_072),
        ),
        # Weights and checkpoint sizes: OpenAI, gpt-oss model card (2025), table 1.
        "gpt-oss-20b": Preset(
            "openai/gpt-oss-20b",
            GPT_OSS
            | _layers(24, 2880, 64, 8)
            | _experts(32, 4)
            | {"layer_types": ["sliding_attention", "full_attention"] * 12},
            num_parameters=20_910_000_000,
            num_active_parameters=3_610_000_000,
            weights_nbytes=int(12.8 * GIB),
        ),
        "gpt-oss-120b": Preset(
            "openai/gpt-oss-120b",
            GPT_OSS
            | _layers(36, 2880, 64, 8)
            | _experts(128, 4)
            | {"layer_types": ["sliding_attention", "full_attention"] * 18},
            num_parameters=116_830_000_000,
            num_active_parameters=5_130_000_000,
            weights_nbytes=int(60.8 * GIB),
        ),
        # Weights: DeepSeek-V3 technical report (2024), abstract; without the multi-token prediction layer.
        "deepseek-v3": Preset(
            "deepseek-ai/DeepSeek-V3",
            {
                "model_type": "deepseek_v3",
                "torch_dtype": "bfloat16",
                "quantization_config": {"quant_method": "fp8"},
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
                "max_position_embeddings": 163_840,
            }
            | _layers(61, 7168, 128, 128)
            | _experts(256, 8),
            num_parameters=671 * BILLION,
            num_active_parameters=37 * BILLION,
        ),
        # Weights: Lieber et al., Jamba (2024), abstract.
        "jamba-v0.1": Preset(
            "ai21labs/Jamba-v0.1",
            {
                "model_type": "jamba",
                "torch_dtype": "bfloat16",
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "max_position_embeddings": 262_144,
            }
            | _layers(32, 4096, 32, 8)
            | _experts(16, 2),
            num_parameters=52 * BILLION,
            num_active_parameters=12 * BILLION,
        ),
        "llama-4-scout": Preset(
            "meta-llama/Llama-4-Scout-17B-16E",
            {
                "model_type": "llama4_text",
                "torch_dtype": "bfloat16",
                "head_dim": 128,
                "attention_chunk_size": 8192,
                "max_position_embeddings": 10_485_760,
            }
            | _layers(48, 5120, 40, 8)
            | _experts(16, 1),
            num_parameters=109 * BILLION,
            num_active_parameters=17 * BILLION,
        ),
    }
)


def model_names() -> tuple[str, ...]:
    """Return the names of all presets, in alphabetical order."""
    return tuple(sorted(PRESETS))
