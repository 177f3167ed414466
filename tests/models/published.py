"""Configs of models of 2025 and 2026 with what they keep, worked out by hand: bytes a token by group, and of a state.

A config has the keys that matter, as they are published: what a file leaves out is left out here, and is then the
default of the model's own class. All are served in bfloat16; the scans of states are in float32.
"""

from typing import Any, Final

__all__ = ["KEPT", "UNKNOWN", "Config", "Kept"]

Config = dict[str, Any]
Kept = tuple[Config, dict[str, int], int]
BF16: Final[Config] = {"torch_dtype": "bfloat16"}
FP8: Final[Config] = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}


def sized(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, **others: object) -> Config:
    return BF16 | {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


def experts(num: int, used: int, width: int, **others: object) -> Config:
    return {"num_experts": num, "num_experts_per_tok": used, "moe_intermediate_size": width, **others}


def routed(num: int, used: int, width: int, dense: int = 1, **others: object) -> Config:
    return {
        "n_routed_experts": num,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "n_shared_experts": 1,
        "first_k_dense_replace": dense,
        "n_group": 1,
        "topk_group": 1,
        **others,
    }


def latents(q_rank: int | None, nope: int, value: int) -> Config:
    ranks = {"q_lora_rank": q_rank, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return ranks | {"qk_nope_head_dim": nope, "v_head_dim": value}


def alternating(*kinds_and_numbers: str | int, layers: int) -> list[str]:
    kinds = [
        str(kind)
        for kind, number in zip(kinds_and_numbers[::2], kinds_and_numbers[1::2], strict=True)
        for _ in range(int(number))
    ]
    return [kinds[layer % len(kinds)] for layer in range(layers)]


def kv(layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of a token's keys and values, of two bytes each."""
    return layers * 2 * kv_heads * head_dim * 2


def delta(layers: int, heads: int, key_heads: int) -> int:
    """Bytes of states of gated DeltaNet with heads of 128: the scan, and the four last inputs of a convolution."""
    return layers * (heads * 128 * 128 * 4 + (2 * key_heads + heads) * 128 * 4 * 2)


LINEAR: Final[Config] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
QWEN_3_5_TYPES: Final = ("linear_attention", 3, "full_attention", 1)
SLIDING_5: Final = ("sliding_attention", 5, "full_attention", 1)
SLIDING_3: Final = ("sliding_attention", 3, "full_attention", 1)
GEMMA_4: Final[Config] = {
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "vocab_size": 262_144,
    "max_position_embeddings": 262_144,
}
NEMOTRON_NANO_2: Final = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NEMOTRON_3_NANO: Final = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
MAMBA_2: Final[Config] = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4}


def mamba_2(layers: int, heads: int, head_dim: int, d_state: int, groups: int) -> int:
    """Bytes of states of Mamba-2: the scan in float32, and the four last inputs of a convolution."""
    channels = heads * head_dim
    return layers * (channels * d_state * 4 + (channels + 2 * groups * d_state) * 4 * 2)


KEPT: Final[dict[str, Kept]] = {
    # GLM: 92 layers of 8 heads of 128; latents of 512 + 64, with an indexer's key of 128 beside them in GLM-5
    "GLM-4.5": (
        sized("glm4_moe", 92, 5120, 96, 8, head_dim=128, intermediate_size=12_288, vocab_size=151_552)
        | routed(160, 8, 1536, 3, max_position_embeddings=131_072),
        {"full": kv(92, 8, 128)},
        0,
    ),
    "GLM-4.7-Flash": (
        sized("glm4_moe_lite", 47, 2048, 20, 20, intermediate_size=10_240, vocab_size=154_880)
        | routed(64, 4, 1536, max_position_embeddings=202_752)
        | latents(768, 192, 256),
        {"full": 47 * 576 * 2},
        0,
    ),
    "GLM-5": (
        sized("glm_moe_dsa", 78, 6144, 64, 64, intermediate_size=12_288, vocab_size=154_880)
        | routed(256, 8, 2048, 3, max_position_embeddings=202_752)
        | latents(2048, 192, 256)
        | {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048},
        {"full": 109_824},
        0,
    ),
    "DeepSeek-V3": (
        sized("deepseek_v3", 61, 7168, 128, 128, intermediate_size=18_432, vocab_size=129_280)
        | routed(256, 8, 2048, 3, max_position_embeddings=163_840, n_group=8, topk_group=4)
        | latents(1536, 128, 128)
        | FP8,
        {"full": 61 * 576 * 2},
        0,
    ),
    "DeepSeek-V3.2": (
        sized("deepseek_v32", 61, 7168, 128, 128, intermediate_size=18_432, vocab_size=129_280)
        | routed(256, 8, 2048, 3, max_position_embeddings=163_840, n_group=8, topk_group=4)
        | latents(1536, 128, 128)
        | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
        | FP8,
        {"full": 61 * (576 + 128) * 2},
        0,
    ),
    # 43 layers keep 512 elements of each of 128 tokens, as keys and values at once. 21 keep an entry of 512 elements,
    # and one of an indexer of 128, for 4 tokens, 20 an entry of 512 for 128 tokens; tokens that are not compressed yet
    # with their gates: 2 series of 512 and of 128, of two entries, and one of 512
    "DeepSeek-V4-Flash": (
        sized("deepseek_v4", 43, 4096, 64, 1, head_dim=512, q_lora_rank=1024, qk_rope_head_dim=64, vocab_size=129_280)
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048}
        | {"compress_ratios": [0, 0, *([4, 128] * 20), 4, 0], "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024}
        | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "num_hash_layers": 3, "hc_mult": 4}
        | {"max_position_embeddings": 1_048_576, "quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"},
        {
            "full": 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128,
            "window_8": 21 * 2 * 2 * (512 + 128) * 2,
            "window_128": 43 * 512 * 2,
            "chunk_128": 20 * 2 * 512 * 2,
        },
        0,
    ),
    # a type that transformers does not name: the file names DeepseekV3ForCausalLM
    "Kimi-K2": (
        sized("kimi_k2", 61, 7168, 64, 64, intermediate_size=18_432, vocab_size=163_840)
        | {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_deepseek.Config"}}
        | routed(384, 8, 2048, 1, max_position_embeddings=131_072)
        | latents(1536, 128, 128)
        | FP8,
        {"full": 61 * 576 * 2},
        0,
    ),
    "Kimi-K2.5": (
        {
            "model_type": "kimi_k25",
            "architectures": ["KimiK25ForConditionalGeneration"],
            "dtype": "bfloat16",
            "vision_config": {},
            "text_config": sized("kimi_k2", 61, 7168, 64, 64, intermediate_size=18_432, vocab_size=163_840)
            | {"architectures": ["DeepseekV3ForCausalLM"]}
            | routed(384, 8, 2048, 1, max_position_embeddings=262_144)
            | latents(1536, 128, 128),
        },
        {"full": 61 * 576 * 2},
        0,
    ),
    # 7 layers of latents; 20 of 32 heads of 128, each with convolutions of queries, keys and values
    "Kimi-Linear": (
        sized("kimi_linear", 27, 2304, 32, 32, head_dim=72, intermediate_size=9216, vocab_size=163_840)
        | {"num_experts": 256, "num_experts_per_token": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1}
        | latents(None, 128, 128)
        | {
            "first_k_dense_replace": 1,
            "model_max_length": 1_048_576,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "head_dim": 128,
                "kda_layers": [layer for layer in range(1, 27) if layer % 4],
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
        {"full": 7 * 576 * 2, "state": 0},
        20 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 4 * 2),
    ),
    "Qwen3-8B": (
        sized("qwen3", 36, 4096, 32, 8, head_dim=128, intermediate_size=12_288, vocab_size=151_936)
        | {"max_position_embeddings": 40_960, "use_sliding_window": False, "tie_word_embeddings": False},
        {"full": kv(36, 8, 128)},
        0,
    ),
    "Qwen3-0.6B": (
        sized("qwen3", 28, 1024, 16, 8, head_dim=128, intermediate_size=3072, vocab_size=151_936)
        | {"max_position_embeddings": 40_960, "tie_word_embeddings": True},
        {"full": kv(28, 8, 128)},
        0,
    ),
    "Qwen3-30B-A3B": (
        sized("qwen3_moe", 48, 2048, 32, 4, head_dim=128, intermediate_size=6144, vocab_size=151_936)
        | experts(128, 8, 768, max_position_embeddings=40_960),
        {"full": kv(48, 4, 128)},
        0,
    ),
    "Qwen3-235B-A22B": (
        sized("qwen3_moe", 94, 4096, 64, 4, head_dim=128, intermediate_size=12_288, vocab_size=151_936)
        | experts(128, 8, 1536, max_position_embeddings=40_960),
        {"full": kv(94, 4, 128)},
        0,
    ),
    "Qwen3-Next-80B-A3B": (
        sized("qwen3_next", 48, 2048, 16, 2, head_dim=256, intermediate_size=5120, vocab_size=151_936)
        | experts(512, 10, 512, max_position_embeddings=262_144, shared_expert_intermediate_size=512)
        | {"full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | LINEAR,
        {"full": kv(12, 2, 256), "state": 0},
        delta(36, 32, 16),
    ),
    "Qwen3.5-27B": (
        {
            "model_type": "qwen3_5",
            "text_config": sized("qwen3_5_text", 64, 5120, 24, 4, head_dim=256, intermediate_size=17_408)
            | {"layer_types": alternating(*QWEN_3_5_TYPES, layers=64), "vocab_size": 248_320, "dtype": "bfloat16"}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 48, "max_position_embeddings": 262_144}
            | {"mamba_ssm_dtype": "float32"}
            | LINEAR,
            "vision_config": {"depth": 27},
        },
        {"full": kv(16, 4, 256), "state": 0},
        delta(48, 48, 16),
    ),
    "Qwen3.5-35B-A3B": (
        {
            "model_type": "qwen3_5_moe",
            "text_config": sized("qwen3_5_moe_text", 40, 2048, 16, 2, head_dim=256)
            | experts(256, 8, 512, max_position_embeddings=262_144, shared_expert_intermediate_size=512)
            | {"layer_types": alternating(*QWEN_3_5_TYPES, layers=40), "vocab_size": 248_320}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "mamba_ssm_dtype": "float32"}
            | LINEAR,
        },
        {"full": kv(10, 2, 256), "state": 0},
        delta(30, 32, 16),
    ),
    "Qwen3.5-397B-A17B": (
        {
            "model_type": "qwen3_5_moe",
            "text_config": sized("qwen3_5_moe_text", 60, 4096, 32, 2, head_dim=256)
            | experts(512, 10, 1024, max_position_embeddings=262_144, shared_expert_intermediate_size=1024)
            | {"layer_types": alternating(*QWEN_3_5_TYPES, layers=60), "vocab_size": 248_320}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 64, "mamba_ssm_dtype": "float32"}
            | LINEAR,
        },
        {"full": kv(15, 2, 256), "state": 0},
        delta(45, 64, 16),
    ),
    "Qwen3-VL-8B": (
        {
            "model_type": "qwen3_vl",
            "text_config": sized("qwen3_vl_text", 36, 4096, 32, 8, head_dim=128, intermediate_size=12_288)
            | {"vocab_size": 151_936, "max_position_embeddings": 262_144},
            "vision_config": {"depth": 27},
        },
        {"full": kv(36, 8, 128)},
        0,
    ),
    "MiniMax-M2": (
        sized("minimax_m2", 62, 3072, 48, 8, head_dim=128, intermediate_size=1536, vocab_size=200_064)
        | {"attn_type_list": [1] * 62, "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64}
        | {"max_position_embeddings": 196_608, "quantization_config": {"quant_method": "fp8"}},
        {"full": kv(62, 8, 128)},
        0,
    ),
    # 9 layers of 4 heads, 39 of 8 in a window: keys of 192, values of 128
    "MiMo-V2-Flash": (
        sized("mimo_v2_flash", 48, 4096, 64, 4, head_dim=192, v_head_dim=128, intermediate_size=16_384)
        | routed(256, 8, 2048, max_position_embeddings=262_144, vocab_size=152_576, n_shared_experts=None)
        | {
            "quantization_config": {"quant_method": "fp8"},
            "hybrid_layer_pattern": [0, *([1] * 4), 0, *(([1] * 5 + [0]) * 7)],
            "sliding_window": 128,
        }
        | {"sliding_window_size": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128},
        {"full": 9 * 4 * (192 + 128) * 2, "window_129": 39 * 8 * (192 + 128) * 2},
        0,
    ),
    # the files name no type: quantised, they are computed in bfloat16
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "vocab_size": 201_088,
            "max_position_embeddings": 131_072,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
        {"full": kv(12, 8, 64), "window_128": kv(12, 8, 64)},
        0,
    ),
    "gpt-oss-120b": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "vocab_size": 201_088,
            "max_position_embeddings": 131_072,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
        {"full": kv(18, 8, 64), "window_128": kv(18, 8, 64)},
        0,
    ),
    "gemma-3-27b": (
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "intermediate_size": 21_504,
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "sliding_window": 1024,
                "vocab_size": 262_208,
                "query_pre_attn_scalar": 168,
            },
            "vision_config": {"num_hidden_layers": 27},
        },
        {"full": kv(10, 16, 128), "window_1024": kv(52, 16, 128)},
        0,
    ),
    "gemma-3n-E4B": (
        sized("gemma3n_text", 35, 2048, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=15)
        | {"layer_types": alternating("sliding_attention", 4, "full_attention", 1, layers=35)},
        {"full": kv(4, 2, 256), "window_512": kv(16, 2, 256)},
        0,
    ),
    "gemma-4-31b": (
        {
            "model_type": "gemma4",
            "dtype": "bfloat16",
            "text_config": sized("gemma4_text", 60, 5376, 32, 16, intermediate_size=21_504)
            | GEMMA_4
            | {"num_global_key_value_heads": 4, "layer_types": alternating(*SLIDING_5, layers=60)},
        },
        {"full": kv(10, 4, 512), "window_1024": kv(50, 16, 256)},
        0,
    ),
    "gemma-4-26b-a4b": (
        {
            "model_type": "gemma4",
            "dtype": "bfloat16",
            "text_config": sized("gemma4_text", 30, 2816, 16, 8, intermediate_size=2112)
            | GEMMA_4
            | {"num_global_key_value_heads": 2, "layer_types": alternating(*SLIDING_5, layers=30)}
            | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        },
        {"full": kv(5, 2, 512), "window_1024": kv(25, 8, 256)},
        0,
    ),
    "Mistral-Small-3.2-24B": (
        {
            "model_type": "mistral3",
            "torch_dtype": "bfloat16",
            "text_config": sized("mistral", 40, 5120, 32, 8, head_dim=128, intermediate_size=32_768)
            | {"vocab_size": 131_072, "max_position_embeddings": 131_072, "sliding_window": None},
        },
        {"full": kv(40, 8, 128)},
        0,
    ),
    "Ministral-3-8B": (
        {
            "model_type": "mistral3",
            "dtype": "bfloat16",
            "text_config": sized("ministral3", 34, 4096, 32, 8, head_dim=128, intermediate_size=14_336)
            | {"vocab_size": 131_072, "max_position_embeddings": 262_144, "sliding_window": None},
        },
        {"full": kv(34, 8, 128)},
        0,
    ),
    "Llama-4-Scout": (
        {
            "model_type": "llama4",
            "torch_dtype": "bfloat16",
            "text_config": sized("llama4_text", 48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192)
            | {"intermediate_size": 8192, "intermediate_size_mlp": 16_384, "vocab_size": 202_048}
            | {"num_local_experts": 16, "num_experts_per_tok": 1, "no_rope_layers": [], "interleave_moe_layer_step": 1}
            | {"max_position_embeddings": 10_485_760},
        },
        {"full": kv(12, 8, 128), "chunk_8192": kv(36, 8, 128)},
        0,
    ),
    "Llama-4-Maverick": (
        {
            "model_type": "llama4",
            "torch_dtype": "bfloat16",
            "text_config": sized("llama4_text", 48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192)
            | {"intermediate_size": 8192, "intermediate_size_mlp": 16_384, "vocab_size": 202_048}
            | {"num_local_experts": 128, "num_experts_per_tok": 1, "no_rope_layers": [], "interleave_moe_layer_step": 2}
            | {"max_position_embeddings": 1_048_576},
        },
        {"full": kv(12, 8, 128), "chunk_8192": kv(36, 8, 128)},
        0,
    ),
    # each of 44 layers has both: attention of 2 heads of 128, and Mamba-2 with 24 heads of 128
    "Falcon-H1-7B": (
        sized("falcon_h1", 44, 3072, 12, 2, head_dim=128, intermediate_size=12_288, vocab_size=130_048)
        | {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1}
        | {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "max_position_embeddings": 262_144},
        {"full": kv(44, 2, 128), "state": 0},
        mamba_2(44, 24, 128, 256, 1),
    ),
    # convolutions of three taps, 10 of 16 layers
    "LFM2-1.2B": (
        sized("lfm2", 16, 2048, 32, 8, block_ff_dim=12_288, vocab_size=65_536, conv_L_cache=3)
        | {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128_000},
        {"full": kv(6, 8, 64), "state": 0},
        10 * 2048 * 3 * 2,
    ),
    "LFM2-8B-A1B": (
        sized("lfm2_moe", 24, 2048, 32, 8, intermediate_size=7168, vocab_size=65_536, conv_L_cache=3)
        | experts(32, 4, 1792, num_dense_layers=2, max_position_embeddings=128_000)
        | {"layer_types": ["full_attention" if i in {2, 6, 10, 14, 18, 21} else "conv" for i in range(24)]},
        {"full": kv(6, 8, 64), "state": 0},
        18 * 2048 * 3 * 2,
    ),
    # attention of 32 heads over twice the width, at 13 of 81 layers, all of which have Mamba-2 with 112 heads of 64
    "Zamba2-7B": (
        sized("zamba2", 81, 3584, 32, 32, attention_head_dim=224, intermediate_size=14_336, vocab_size=32_000)
        | {"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 112}
        | {"num_mem_blocks": 2, "use_shared_attention_adapter": False, "adapter_rank": 128}
        | {"hybrid_layer_ids": [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77], "max_position_embeddings": 4096}
        | {
            "layers_block_type": [
                "hybrid" if layer in {6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77} else "mamba"
                for layer in range(81)
            ]
        },
        {"full": kv(13, 32, 224), "state": 0},
        mamba_2(81, 112, 64, 64, 2),
    ),
    "Hunyuan-7B": (
        sized("hunyuan_v1_dense", 32, 4096, 32, 8, head_dim=128, intermediate_size=14_336, vocab_size=128_167)
        | {"max_position_embeddings": 32_768},
        {"full": kv(32, 8, 128)},
        0,
    ),
    "Hunyuan-A13B": (
        sized("hunyuan_v1_moe", 32, 4096, 32, 8, head_dim=128, intermediate_size=3072, vocab_size=128_167)
        | {"num_experts": 64, "moe_topk": [8] * 32, "max_position_embeddings": 32_768},
        {"full": kv(32, 8, 128)},
        0,
    ),
    "EXAONE-4.0-32B": (
        sized("exaone4", 64, 5120, 40, 8, head_dim=128, intermediate_size=27_392, vocab_size=102_400)
        | {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "max_position_embeddings": 131_072}
        | {"layer_types": alternating(*SLIDING_3, layers=64)},
        {"full": kv(16, 8, 128), "window_4096": kv(48, 8, 128)},
        0,
    ),
    "dots.llm1": (
        sized("dots1", 62, 4096, 32, 32, head_dim=128, intermediate_size=10_944, vocab_size=152_064)
        | routed(128, 6, 1408, 1, n_shared_experts=2, sliding_window=None, max_position_embeddings=32_768),
        {"full": kv(62, 32, 128)},
        0,
    ),
    # each of 28 layers has two attentions
    "LongCat-Flash": (
        BF16
        | {"model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6144, "num_attention_heads": 64}
        | {"ffn_hidden_size": 12_288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256}
        | {"moe_topk": 12, "vocab_size": 131_072, "max_position_embeddings": 131_072}
        | latents(1536, 128, 128),
        {"full": 56 * 576 * 2},
        0,
    ),
    "ERNIE-4.5-21B-A3B": (
        sized("ernie4_5_moe", 28, 2560, 20, 4, head_dim=128, intermediate_size=12_288, vocab_size=103_424)
        | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 27, "max_position_embeddings": 131_072},
        {"full": kv(28, 4, 128)},
        0,
    ),
    "ERNIE-4.5-0.3B": (
        sized("ernie4_5", 18, 1024, 16, 2, head_dim=128, intermediate_size=3072, vocab_size=103_424),
        {"full": kv(18, 2, 128)},
        0,
    ),
    "SmolLM3-3B": (
        sized("smollm3", 36, 2048, 16, 4, intermediate_size=11_008, vocab_size=128_256)
        | {"no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False, "max_position_embeddings": 65_536},
        {"full": kv(36, 4, 128)},
        0,
    ),
    "Olmo-3-7B": (
        sized("olmo3", 32, 4096, 32, 32, intermediate_size=11_008, vocab_size=100_278, sliding_window=4096)
        | {"layer_types": alternating(*SLIDING_3, layers=32), "max_position_embeddings": 65_536},
        {"full": kv(8, 32, 128), "window_4096": kv(24, 32, 128)},
        0,
    ),
    "OLMo-2-32B": (
        sized("olmo2", 64, 5120, 40, 8, intermediate_size=27_648, vocab_size=100_352),
        {"full": kv(64, 8, 128)},
        0,
    ),
    "Seed-OSS-36B": (
        sized("seed_oss", 64, 5120, 80, 8, head_dim=128, intermediate_size=27_648, vocab_size=155_136),
        {"full": kv(64, 8, 128)},
        0,
    ),
    # 4 of 40 layers; 36 of Mamba-2 with 128 heads of 64
    "granite-4.0-h-small": (
        sized("granitemoehybrid", 40, 4096, 32, 8, intermediate_size=768, vocab_size=100_352)
        | {"num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536}
        | MAMBA_2
        | {"mamba_n_groups": 1, "mamba_expand": 2, "position_embedding_type": "nope"}
        | {"layer_types": ["attention" if layer in {5, 15, 25, 35} else "mamba" for layer in range(40)]},
        {"full": kv(4, 8, 128), "state": 0},
        mamba_2(36, 128, 64, 128, 1),
    ),
    # 4 attention layers and 27 of Mamba-2 with 128 heads of 80
    "NVIDIA-Nemotron-Nano-9B-v2": (
        sized("nemotron_h", 56, 4480, 40, 8, head_dim=128, intermediate_size=15_680, vocab_size=131_072)
        | {"hybrid_override_pattern": NEMOTRON_NANO_2, "mamba_num_heads": 128, "mamba_head_dim": 80}
        | {"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2, "max_position_embeddings": 131_072},
        {"full": kv(4, 8, 128), "state": 0},
        mamba_2(27, 128, 80, 128, 8),
    ),
    # 6 attention layers and 23 of Mamba-2 with 64 heads of 64
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        sized("nemotron_h", 52, 2688, 32, 2, head_dim=128, intermediate_size=1856, vocab_size=131_072)
        | {"hybrid_override_pattern": NEMOTRON_3_NANO, "mamba_num_heads": 64, "mamba_head_dim": 64}
        | {"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2, "max_position_embeddings": 262_144}
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1}
        | {"moe_shared_expert_intermediate_size": 3712},
        {"full": kv(6, 2, 128), "state": 0},
        mamba_2(23, 64, 64, 128, 8),
    ),
    "Phi-4-mini": (
        sized("phi3", 32, 3072, 24, 8, intermediate_size=8192, vocab_size=200_064, sliding_window=262_144)
        | {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
        | {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
            "tie_word_embeddings": True,
        },
        {"full": kv(32, 8, 128)},
        0,
    ),
    "Apertus-8B": (
        sized("apertus", 32, 4096, 32, 8, intermediate_size=21_504, vocab_size=131_072),
        {"full": kv(32, 8, 128)},
        0,
    ),
    "AFM-4.5B": (
        sized("arcee", 36, 2560, 20, 4, head_dim=128, intermediate_size=18_432, vocab_size=128_004),
        {"full": kv(36, 4, 128)},
        0,
    ),
    "command-a": (
        sized("cohere2", 64, 12_288, 96, 8, head_dim=128, intermediate_size=36_864, vocab_size=256_000)
        | {"sliding_window": 4096, "sliding_window_pattern": 4, "max_position_embeddings": 131_072},
        {"full": kv(16, 8, 128), "window_4096": kv(48, 8, 128)},
        0,
    ),
    "Jamba-Mini-1.7": (
        sized("jamba", 32, 4096, 32, 8, intermediate_size=14_336, vocab_size=65_536)
        | {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
        | {"num_experts": 16, "num_experts_per_tok": 2, "mamba_dt_rank": 256, "max_position_embeddings": 262_144},
        {"full": kv(4, 8, 128), "state": 0},
        28 * (8192 * 16 * 4 + 8192 * 4 * 2),
    ),
}
"""Known by their classes."""

UNKNOWN: Final[dict[str, tuple[Config, str]]] = {
    "MiniMax-Text-01": (
        sized("minimax", 80, 6144, 64, 8, head_dim=128, intermediate_size=9216, vocab_size=200_064)
        | {"num_local_experts": 32, "num_experts_per_tok": 2}
        | {"layer_types": alternating("linear_attention", 7, "full_attention", 1, layers=80)},
        "MiniMax uses cache of its own",
    ),
    "Ling-1T": (
        sized("bailing_moe", 80, 8192, 64, 8, head_dim=128)
        | {"architectures": ["BailingMoeV2ForCausalLM"], "auto_map": {"AutoConfig": "configuration.BailingConfig"}},
        r"no class for the model_type 'bailing_moe' \(BailingMoeV2ForCausalLM\), and code that lies beside a model",
    ),
    "Step-3": (
        sized("step3_text", 61, 7168, 64, 1, share_q_dim=2048) | {"architectures": ["Step3TextForCausalLM"]},
        "no class for the model_type 'step3_text'",
    ),
}
"""Refused, with the reason."""
