"""The meaning of a config's keys for the twenty most used ``model_type``; a type without a family is refused.

This table is for those who have no torch. With transformers installed, a model's own class is asked instead
(:mod:`pagedkv.probe.sizing`), and a test holds the two together.

The cost of an attention layer is its memory for a token, and its operations for a pair of a query and a key. Keys and
values of grouped-query attention (Ainslie et al., GQA, EMNLP 2023)::

    token       [2 (keys, values)][num_kv_heads][head_dim]
    pair        2 * head_dim operations for the score, as many to add the value; for every *query* head

Multi-head attention (as many key heads as query heads) and multi-query attention (one key head) are its extremes.
Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) keeps one latent vector and one rotary key for all heads::

    token       [kv_lora_rank + qk_rope_head_dim]
    pair        2 * (qk_nope_head_dim + qk_rope_head_dim) + 2 * v_head_dim operations, for every head

These are the operations of a prefill, where keys and values are computed from the latent. Decoding folds that product
into the queries and takes about three times as many operations a pair; most of its steps are limited by memory.

A family defines the rule of each layer if the file lists none, the memory of an attention layer for a token, the memory
of a recurrent layer, and the *size keys* that its configs may have. A size key changes the size of the cache. A config
with a size key that its family does not list is refused, since the result would be silently wrong. Key names and
defaults are those of the configuration classes of Hugging Face transformers, where each ``model_type`` is defined.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from pagedkv.contract.extras import to_install
from pagedkv.models.config import COMPARE, ModelConfig
from pagedkv.models.layer_rules import (
    RuleReader,
    all_full,
    attention_every,
    chunk_unless_no_rope,
    full_unless_lightning,
    layers_must_be_listed,
    window_below_top,
    window_everywhere,
    window_except_every,
)
from pagedkv.models.memory import gated_delta_state_nbytes

MAX_HEADS: Final = 2**16
MAX_DIM: Final = 2**24
KEYS_AND_VALUES: Final = 2
OPERATIONS_PER_PRODUCT: Final = 2
"""A multiplication and an addition."""


@dataclass(frozen=True, slots=True)
class KeptByAttention:
    """The cost of one layer.

    Args:
        token_numel: elements kept for a token.
        pair_flops: floating-point operations for one query attending to one key.
    """

    token_numel: int
    pair_flops: int


def grouped_heads(config: ModelConfig) -> KeptByAttention:
    """Size a layer whose config must state the number of key heads. Raises ConfigurationError."""
    return _size_of_heads(config, config.count("num_key_value_heads", most=MAX_HEADS))


def every_head(config: ModelConfig) -> KeptByAttention:
    """Size a layer of a family older than grouped queries (OPT): a key head for each query head."""
    return _size_of_heads(config, _num_heads(config))


def plain_heads(config: ModelConfig) -> KeptByAttention:
    """Size a layer that has a key head for each query head unless the config states another number."""
    return _size_of_heads(config, config.count_or(_num_heads(config), "num_key_value_heads", most=MAX_HEADS))


def latents(config: ModelConfig) -> KeptByAttention:
    """Size a layer of multi-head latent attention. Raises ConfigurationError."""
    rope_dim = config.count("qk_rope_head_dim", most=MAX_DIM)
    head_dims = config.count("qk_nope_head_dim", most=MAX_DIM) + rope_dim + config.count("v_head_dim", most=MAX_DIM)
    return KeptByAttention(
        token_numel=config.count("kv_lora_rank", most=MAX_DIM) + rope_dim,
        pair_flops=OPERATIONS_PER_PRODUCT * _num_heads(config) * head_dims,
    )


def _size_of_heads(config: ModelConfig, num_kv_heads: int) -> KeptByAttention:
    """Size a layer with a number of key heads.

    Raises:
        ConfigurationError: the query heads are not a multiple of them, or the width is not a multiple of the heads.
    """
    num_heads = _num_heads(config)
    if num_heads % num_kv_heads:
        raise config.fault(
            "num_key_value_heads", f"is {num_kv_heads}, which does not divide the {num_heads} query heads", COMPARE
        )
    head_dim = _head_dim(config, num_heads)
    return KeptByAttention(
        token_numel=KEYS_AND_VALUES * num_kv_heads * head_dim,
        pair_flops=KEYS_AND_VALUES * OPERATIONS_PER_PRODUCT * num_heads * head_dim,
    )


def _num_heads(config: ModelConfig) -> int:
    return config.count("num_attention_heads", most=MAX_HEADS)


def _head_dim(config: ModelConfig, num_heads: int) -> int:
    if config.has("head_dim"):
        return config.count("head_dim", most=MAX_DIM)
    hidden = config.count("hidden_size", most=MAX_DIM)
    if hidden % num_heads:
        raise config.fault(
            "hidden_size", f"is {hidden}, which the {num_heads} heads do not divide; head_dim is missing", COMPARE
        )
    return hidden // num_heads


NO_DEFAULTS: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the configs of one kind of model.

    Args:
        rules: returns the rule of each layer, where the config has no list of layer types.
        attention: returns the memory of one attention layer.
        state_nbytes: returns the memory of one recurrent layer; None where there is none.
        size_keys: the size keys that configs of this family may have.
        defaults: values of keys that files of this family omit.
    """

    rules: RuleReader
    attention: Callable[[ModelConfig], KeptByAttention]
    state_nbytes: Callable[[ModelConfig], int] | None = None
    size_keys: frozenset[str] = frozenset()
    defaults: Mapping[str, object] = field(default_factory=lambda: NO_DEFAULTS)


WINDOW_KEYS: Final = frozenset({"sliding_window", "sliding_window_pattern", "_sliding_window_pattern"})
LINEAR_KEYS: Final = frozenset({"linear_num_value_heads", "full_attention_interval"})
LATENT_KEYS: Final = frozenset({"kv_lora_rank"})
CHUNK_KEYS: Final = frozenset({"attention_chunk_size"})
LIGHTNING_KEYS: Final = frozenset({"attn_type_list"})
UNSUPPORTED_KEYS: Final = frozenset(
    {
        "attention_k_eq_v",  # Gemma 4: keys serve as values
        "block_configs",  # pruned models, each layer with its own heads
        "cross_attention_layers",  # Llama 3.2 Vision
        "global_head_dim",  # Gemma 4
        "index_head_dim",  # DeepSeek-V3.2: a further key for each token
        "linear_attn_config",  # Kimi Linear
        "mamba_d_state",  # Falcon-H1 and other hybrids
        "num_global_key_value_heads",  # Gemma 4
        "num_key_value_heads_per_layer",  # DeciLM
        "num_kv_shared_layers",  # Gemma 3n
        "ssm_state_size",  # Nemotron-H
        "swa_num_key_value_heads",  # MiMo-V2
    }
)
SIZE_KEYS: Final = WINDOW_KEYS | LINEAR_KEYS | LATENT_KEYS | CHUNK_KEYS | LIGHTNING_KEYS | UNSUPPORTED_KEYS


def _with_head_dim(family: Family, head_dim: int) -> Family:
    """Return a family with its class's head dimension, for files that omit it although it is not hidden / heads."""
    return replace(family, defaults={**family.defaults, "head_dim": head_dim})


GROUPED: Final = Family(all_full, grouped_heads)
ALL_WINDOWED: Final = Family(window_everywhere, grouped_heads, size_keys=WINDOW_KEYS)
QWEN: Final = Family(window_below_top, grouped_heads, size_keys=WINDOW_KEYS)
LATENT: Final = Family(all_full, latents, size_keys=LATENT_KEYS)
GEMMA_2: Final = Family(window_except_every(2), grouped_heads, size_keys=WINDOW_KEYS, defaults={"head_dim": 256})
GEMMA_3: Final = Family(
    window_except_every(6),
    grouped_heads,
    size_keys=WINDOW_KEYS,
    # The published files omit keys that equal the class's defaults: the 4B model states no heads at all.
    defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
)
GATED_DELTA: Final = Family(
    attention_every,
    grouped_heads,
    gated_delta_state_nbytes,
    LINEAR_KEYS | WINDOW_KEYS,
    {"full_attention_interval": 4, "head_dim": 256},
)
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "opt": Family(all_full, every_head),
        "llama": Family(all_full, plain_heads),
        "glm4_moe": _with_head_dim(GROUPED, 128),
        "minimax_m2": _with_head_dim(replace(GROUPED, rules=full_unless_lightning, size_keys=LIGHTNING_KEYS), 128),
        **dict.fromkeys(("mistral", "mixtral", "phi3"), ALL_WINDOWED),
        **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3_moe"), QWEN),
        "qwen3": _with_head_dim(QWEN, 128),
        **dict.fromkeys(("deepseek_v3", "kimi_k2"), LATENT),
        **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), GATED_DELTA),
        "gemma2": GEMMA_2,
        "gemma3_text": GEMMA_3,
        "gpt_oss": _with_head_dim(replace(ALL_WINDOWED, rules=layers_must_be_listed), 64),
        "llama4_text": _with_head_dim(Family(chunk_unless_no_rope, grouped_heads, size_keys=CHUNK_KEYS), 128),
    }
)


def family_of(config: ModelConfig) -> Family:
    """Return the family that reads a config.

    Args:
        config: the part for the language model.

    Raises:
        ConfigurationError: the model is of an unknown kind, has an encoder, or has a size key that its family does not
            list.
    """
    if config.flag("is_encoder_decoder", default=False):
        raise config.fault(
            "is_encoder_decoder", "is true; only decoders have the KV cache modelled here", "Name a decoder's config"
        )
    model_type = config.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        exact = model_type.lower().replace("-", "_").replace(".", "_")
        raise config.fault(
            "model_type",
            f"is {model_type[:40]!r}, a kind of model not known here without torch and transformers",
            f"It is written {exact}" if exact in FAMILIES else f"Have its own class asked: {to_install('hf')}",
        )
    for key in sorted(SIZE_KEYS - family.size_keys):
        # Null, false, 0 and an empty list mean that the feature is not used.
        if config.values.get(key):
            raise config.fault(
                key,
                f"is set, which is not known of the model_type {model_type!r}",
                "Its effect on the KV cache is unknown; remove the key if it has none",
            )
    return family
