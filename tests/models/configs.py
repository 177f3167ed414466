"""Configs as they are published, one for each family and each way of telling layers apart, and what they must give.

Only the keys that matter, plus a few bystanders. The bytes are worked out by hand in the comments.
"""

from dataclasses import dataclass, field

__all__ = ["LLAMA", "PUBLISHED", "PublishedConfig"]

Config = dict[str, object]
BF16: Config = {"torch_dtype": "bfloat16"}


@dataclass(frozen=True)
class PublishedConfig:
    """A config; bytes a token by group; bytes of a state."""

    config: Config
    token_nbytes: dict[str, int]
    state_nbytes: int = 0
    num_layers: dict[str, int] = field(default_factory=dict)


def layers(num_layers: int, hidden: int, heads: int, kv_heads: int) -> Config:
    return BF16 | {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


LLAMA: Config = (
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "sliding_window": None}
    | layers(32, 4096, 32, 8)
    | {"vocab_size": 128_256, "intermediate_size": 14_336, "max_position_embeddings": 131_072}
)

NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # 24 M, 4 *, 24 -
NEMOTRON: Config = layers(52, 4096, 32, 8) | {
    "model_type": "nemotron_h",
    "attention_head_dim": 128,
    "hybrid_override_pattern": NEMOTRON_PATTERN,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
}
MAMBA_2: Config = {
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
# channels 2 * 4096; 2 bytes * (8192 * 128 + (8192 + 2 * 128) * 3)
MAMBA_2_NBYTES = 2_147_840
QWEN3_NEXT: Config = layers(48, 2048, 16, 2) | {
    "model_type": "qwen3_next",
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# 36 layers * 2 bytes * (32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3)
QWEN3_NEXT_NBYTES = 39_518_208
LLAMA_4: Config = layers(48, 5120, 40, 8) | {
    "model_type": "llama4_text",
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "no_rope_layers": [],
}
# 12 and 36 layers * 2 * 8 * 128 * 2 bytes
LLAMA_4_NBYTES = {"full": 49_152, "chunk_8192": 147_456}
GEMMA_3: Config = BF16 | {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
}
# 10 and 52 layers * 2 * 16 * 128 * 2 bytes
GEMMA_3_NBYTES = {"full": 81_920, "window_1024": 425_984}
GEMMA_3N_TYPES = (["sliding_attention"] * 4 + ["full_attention"]) * 7

PUBLISHED: dict[str, PublishedConfig] = {
    # 32 * 2 * 8 * 128 * 2
    "llama": PublishedConfig(LLAMA, {"full": 131_072}),
    # without the key, as many key heads as query heads: 32 * 2 * 32 * 128 * 2
    "llama, no key heads": PublishedConfig(LLAMA | {"num_key_value_heads": None}, {"full": 524_288}),
    # a new release names the type without torch, another with it
    "llama, dtype": PublishedConfig(LLAMA | {"torch_dtype": None, "dtype": "torch.float32"}, {"full": 262_144}),
    "mixtral": PublishedConfig(LLAMA | {"model_type": "mixtral", "sliding_window": None}, {"full": 131_072}),
    "mistral": PublishedConfig(LLAMA | {"model_type": "mistral", "sliding_window": 4096}, {"window_4096": 131_072}),
    # head_dim is not hidden / heads: 64 * 2 * 8 * 128 * 2
    "qwen3": PublishedConfig(
        layers(64, 5120, 64, 8) | {"model_type": "qwen3", "head_dim": 128, "use_sliding_window": False},
        {"full": 262_144},
    ),
    # 64 heads of 80 would be as wide as the model, but the class's own dimension is 128
    "qwen3, dimension left out": PublishedConfig(layers(64, 5120, 64, 8) | {"model_type": "qwen3"}, {"full": 262_144}),
    # 28 * 2 * 4 * 128 * 2; the window is stated and not used
    "qwen2": PublishedConfig(
        layers(28, 3584, 28, 4)
        | {"model_type": "qwen2", "sliding_window": 131_072, "use_sliding_window": False, "max_window_layers": 28},
        {"full": 57_344},
    ),
    # layers 0 to 20 full, 21 to 27 windowed
    "qwen2, window used": PublishedConfig(
        layers(28, 3584, 28, 4)
        | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 21},
        {"full": 43_008, "window_4096": 14_336},
        num_layers={"full": 21, "window_4096": 7},
    ),
    # 40 * 2 * 40 * 128 * 2
    "opt": PublishedConfig(
        {
            "model_type": "opt",
            "torch_dtype": "float16",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "ffn_dim": 20_480,
        },
        {"full": 819_200},
    ),
    # older than grouped queries: the key means nothing
    "gpt_neox": PublishedConfig(LLAMA | {"model_type": "gpt_neox"}, {"full": 524_288}),
    # 12 * 2 * 12 * 64 * 4
    "gpt2": PublishedConfig(
        {"model_type": "gpt2", "torch_dtype": "float32", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024},
        {"full": 73_728},
    ),
    # 70 * 2 * 112 * 128 * 2
    "bloom": PublishedConfig(
        BF16 | {"model_type": "bloom", "n_layer": 70, "num_attention_heads": 112, "n_embed": 14_336},
        {"full": 4_014_080},
    ),
    # 40 * 2 * 1 * 128 * 2
    "gpt_bigcode": PublishedConfig(
        BF16 | {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True},
        {"full": 20_480},
    ),
    "gpt_bigcode, all heads": PublishedConfig(
        BF16 | {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": False},
        {"full": 983_040},
    ),
    # 32 * 2 * 1 * 64 * 2
    "falcon 7b": PublishedConfig(
        BF16
        | {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_kv_heads": 71,
        },
        {"full": 8192},
    ),
    # 60 * 2 * 8 * 64 * 2; multi_query is true in this file too
    "falcon 40b": PublishedConfig(
        BF16
        | {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "multi_query": True,
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
        },
        {"full": 122_880},
    ),
    # 23 layers each * 2 * 16 * 128 * 2
    "gemma2": PublishedConfig(
        layers(46, 4608, 32, 16) | {"model_type": "gemma2", "head_dim": 128, "sliding_window": 4096},
        {"full": 188_416, "window_4096": 188_416},
    ),
    "gemma3": PublishedConfig(GEMMA_3, GEMMA_3_NBYTES, num_layers={"full": 10, "window_1024": 52}),
    # nested, with the type outside
    "gemma3, multimodal": PublishedConfig(
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {key: value for key, value in GEMMA_3.items() if key != "torch_dtype"},
            "vision_config": {"num_hidden_layers": 27},
        },
        GEMMA_3_NBYTES,
    ),
    # as the 4B model is published: 8 heads, 4 key heads of 256, every 6th full. 5 and 29 layers * 2 * 4 * 256 * 2
    "gemma3, defaults left out": PublishedConfig(
        BF16 | {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        {"full": 20_480, "window_1024": 118_784},
    ),
    # of 35 layers the last 15 keep nothing: 4 and 16 layers * 2 * 2 * 256 * 2
    "gemma3n": PublishedConfig(
        layers(35, 2048, 8, 2)
        | {
            "model_type": "gemma3n_text",
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
            "layer_types": GEMMA_3N_TYPES,
        },
        {"full": 8192, "window_512": 32_768},
    ),
    # 16 layers * 2 * 8 * 128 * 2, of which every 4th is full
    "olmo3": PublishedConfig(
        layers(16, 4096, 32, 8)
        | {
            "model_type": "olmo3",
            "sliding_window": 4096,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 4,
        },
        {"full": 16_384, "window_4096": 49_152},
    ),
    # every 4th full: 8 and 24 layers * 2 * 8 * 128 * 2
    "cohere2": PublishedConfig(
        layers(32, 4096, 32, 8) | {"model_type": "cohere2", "sliding_window": 4096, "sliding_window_pattern": 4},
        {"full": 32_768, "window_4096": 98_304},
    ),
    # 18 layers each * 2 * 8 * 64 * 2
    "gpt_oss": PublishedConfig(
        layers(36, 2880, 64, 8)
        | {
            "model_type": "gpt_oss",
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        {"full": 36_864, "window_128": 36_864},
    ),
    "llama4": PublishedConfig(LLAMA_4, LLAMA_4_NBYTES),
    "llama4, rotary layers listed": PublishedConfig(LLAMA_4 | {"no_rope_layers": [1, 1, 1, 0] * 12}, LLAMA_4_NBYTES),
    "llama4, layer types": PublishedConfig(
        LLAMA_4 | {"no_rope_layers": None, "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12},
        LLAMA_4_NBYTES,
    ),
    "llama4, multimodal": PublishedConfig(
        {"model_type": "llama4", "text_config": LLAMA_4, "is_encoder_decoder": False}, LLAMA_4_NBYTES
    ),
    # 61 layers * (512 + 64) * 2
    "deepseek_v3": PublishedConfig(
        layers(61, 7168, 128, 128)
        | {
            "model_type": "deepseek_v3",
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
        },
        {"full": 70_272},
    ),
    # 4 * 2 * 8 * 128 * 2; 28 * 2 bytes * (8192 * 16 + 8192 * 3)
    "jamba": PublishedConfig(
        layers(32, 4096, 32, 8)
        | {
            "model_type": "jamba",
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "sliding_window": None,
        },
        {"full": 16_384, "state": 0},
        8_716_288,
    ),
    # 3 * 2 * 8 * 128 * 2
    "bamba": PublishedConfig(
        layers(32, 4096, 32, 8) | MAMBA_2 | {"model_type": "bamba", "attn_layer_indices": [9, 18, 27]},
        {"full": 12_288, "state": 0},
        29 * MAMBA_2_NBYTES,
        {"full": 3, "state": 29},
    ),
    "bamba, heads by the library": PublishedConfig(
        layers(32, 4096, 32, 8)
        | MAMBA_2
        | {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_d_head": "auto"},
        {"full": 12_288, "state": 0},
        29 * MAMBA_2_NBYTES,
    ),
    # 4 * 2 * 8 * 128 * 2
    "granitemoehybrid": PublishedConfig(
        layers(40, 4096, 32, 8)
        | MAMBA_2
        | {"model_type": "granitemoehybrid", "layer_types": (["mamba"] * 9 + ["attention"]) * 4},
        {"full": 16_384, "state": 0},
        36 * MAMBA_2_NBYTES,
    ),
    # 4 * 2 * 8 * 128 * 2; 24 * 2 bytes * (8192 * 128 + (8192 + 2 * 8 * 128) * 3)
    "nemotron_h": PublishedConfig(
        NEMOTRON, {"full": 16_384, "state": 0}, 51_806_208, num_layers={"full": 4, "state": 24}
    ),
    # 24 * (4 bytes * 8192 * 128 + 2 bytes * (8192 + 2 * 8 * 128) * 3)
    "nemotron_h, state of 4 bytes": PublishedConfig(
        NEMOTRON | {"mamba_ssm_cache_dtype": "float32"}, {"full": 16_384, "state": 0}, 102_137_856
    ),
    "nemotron_h, layers listed": PublishedConfig(
        {key: value for key, value in NEMOTRON.items() if key not in {"hybrid_override_pattern", "num_hidden_layers"}}
        | {
            "layers_block_type": [
                {"M": "linear_attention", "*": "full_attention", "-": "mlp"}[letter] for letter in NEMOTRON_PATTERN
            ]
        },
        {"full": 16_384, "state": 0},
        51_806_208,
    ),
    # 12 * 2 * 2 * 256 * 2
    "qwen3_next": PublishedConfig(QWEN3_NEXT, {"full": 24_576, "state": 0}, QWEN3_NEXT_NBYTES),
    "qwen3_next, layers listed": PublishedConfig(
        QWEN3_NEXT | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12},
        {"full": 24_576, "state": 0},
        QWEN3_NEXT_NBYTES,
    ),
}
