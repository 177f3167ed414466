"""Memory of an attention layer for a token, and its operations for a pair of a query and a key.

Keys and values of grouped-query attention (Ainslie et al., GQA, EMNLP 2023)::

    token       [2 (keys, values)][num_kv_heads][head_dim]
    pair        2 * head_dim operations for the score, as many to add the value; for every *query* head

Multi-head attention (as many key heads as query heads) and multi-query attention (one key head) are its extremes.
Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) keeps one latent vector and one rotary key for all heads::

    token       [kv_lora_rank + qk_rope_head_dim]
    pair        2 * (qk_nope_head_dim + qk_rope_head_dim) + 2 * v_head_dim operations, for every head

These are the operations of a prefill, where keys and values are computed from the latent. Decoding folds that product
into the queries and takes about three times as many operations a pair; most of its steps are limited by memory.
"""

from dataclasses import dataclass
from typing import Final

from pagedkv.models.config import COMPARE, ModelConfig

__all__ = [
    "KeptByAttention",
    "every_head",
    "grouped_heads",
    "heads_of_falcon",
    "heads_of_gpt_bigcode",
    "latents",
    "plain_heads",
]

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
    """Size a layer of a family older than grouped queries: a key head for each query head. Other keys are ignored."""
    return _size_of_heads(config, _num_heads(config))


def plain_heads(config: ModelConfig) -> KeptByAttention:
    """Size a layer that has a key head for each query head unless the config states another number."""
    return _size_of_heads(config, config.count_or(_num_heads(config), "num_key_value_heads", most=MAX_HEADS))


def heads_of_falcon(config: ModelConfig) -> KeptByAttention:
    """Size a Falcon layer: ``num_kv_heads`` counts only in the new architecture; else there are all heads or one.

    transformers repeats the keys of the new architecture for all query heads before it caches them; engines with a
    paged cache do not.
    """
    if config.flag("new_decoder_architecture", default=False):
        return _size_of_heads(config, config.count("num_kv_heads", most=MAX_HEADS))
    return _size_of_heads(config, 1 if config.flag("multi_query", default=True) else _num_heads(config))


def heads_of_gpt_bigcode(config: ModelConfig) -> KeptByAttention:
    """Size a GPT-BigCode layer: one key head unless ``multi_query`` is false."""
    return _size_of_heads(config, 1 if config.flag("multi_query", default=True) else _num_heads(config))


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
        key = config.present("num_key_value_heads", "num_kv_heads") or "num_attention_heads"
        raise config.fault(key, f"is {num_kv_heads}, which does not divide the {num_heads} query heads", COMPARE)
    head_dim = _head_dim(config, num_heads)
    return KeptByAttention(
        token_numel=KEYS_AND_VALUES * num_kv_heads * head_dim,
        pair_flops=KEYS_AND_VALUES * OPERATIONS_PER_PRODUCT * num_heads * head_dim,
    )


def _num_heads(config: ModelConfig) -> int:
    return config.count("num_attention_heads", "n_head", most=MAX_HEADS)


def _head_dim(config: ModelConfig, num_heads: int) -> int:
    # attention_head_dim: Nemotron-H before it was renamed; before head_dim, which may be the class's default.
    if config.present("attention_head_dim", "head_dim"):
        return config.count("attention_head_dim", "head_dim", most=MAX_DIM)
    hidden = config.count("hidden_size", "n_embd", "n_embed", most=MAX_DIM)
    if hidden % num_heads:
        key = config.present("hidden_size", "n_embd", "n_embed")
        assert key is not None
        raise config.fault(key, f"is {hidden}, which the {num_heads} heads do not divide; head_dim is missing", COMPARE)
    return hidden // num_heads
