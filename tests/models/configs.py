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
# 36 layers * (4 bytes * 32 * 128 * 128 + 2 bytes * (2 * 16 * 128 + 32 * 128) * 4)
QWEN3_NEXT_NBYTES = 77_856_768
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
    # 12 * 2 * 2 * 256 * 2
    "qwen3_next": PublishedConfig(QWEN3_NEXT, {"full": 24_576, "state": 0}, QWEN3_NEXT_NBYTES),
    "qwen3_next, layers listed": PublishedConfig(
        QWEN3_NEXT | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12},
        {"full": 24_576, "state": 0},
        QWEN3_NEXT_NBYTES,
    ),
}
