"""The number of weights of a model, if its config determines it, and the number that a token uses.

Weights are counted matrix by matrix for families whose published counts equal these formulas to the last weight (OPT,
Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 2; the tests compare them with the counts in the published checkpoints).
For all others the result is None, since a guess would look like a count. Of a multimodal model only the language model
is counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pagedkv.models.config import ModelConfig

__all__ = ["ParameterCount", "count_parameters", "expert_share"]

GATED_MATRICES: Final = 3
"""Gate, up and down."""
OPT_EXTRA_POSITIONS: Final = 2
NUM_EXPERTS_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS_A_TOKEN_KEYS: Final = ("num_experts_per_tok", "experts_per_token")


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Weights of a model.

    Args:
        num_parameters: all weights.
        num_active: weights that one token is multiplied with; fewer than all in a mixture of experts.
    """

    num_parameters: int
    num_active: int


@dataclass(frozen=True, slots=True)
class _Traits:
    """Differences of the gated families from Llama."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_norms: int = 2
    ties_embeddings: bool = False
    expert_key: str | None = None


GATED: Final[Mapping[str, _Traits]] = MappingProxyType(
    {
        "llama": _Traits(),
        "mistral": _Traits(),
        "mixtral": _Traits(expert_key="intermediate_size"),
        "qwen2": _Traits(has_qkv_bias=True),
        "qwen3": _Traits(has_qk_norm=True),
        "qwen3_moe": _Traits(has_qk_norm=True, expert_key="moe_intermediate_size"),
        "gemma2": _Traits(num_norms=4, ties_embeddings=True),
        "gemma3_text": _Traits(has_qk_norm=True, num_norms=4, ties_embeddings=True),
    }
)


def expert_share(config: ModelConfig) -> float:
    """Return the share of a layer's routed experts that a token uses; 1 where there are none.

    Raises:
        ConfigurationError: the number of experts used for a token is missing, or exceeds the number of experts.
    """
    if config.present(*NUM_EXPERTS_KEYS) is None:
        return 1.0
    num_experts = config.count(*NUM_EXPERTS_KEYS, least=0)
    if num_experts == 0:
        return 1.0
    return config.count(*EXPERTS_A_TOKEN_KEYS, most=num_experts) / num_experts


def count_parameters(config: ModelConfig) -> ParameterCount | None:
    """Count the weights, or return None if the config does not determine them.

    Raises:
        ConfigurationError: a needed key has an impossible value.
    """
    model_type = config.text("model_type")
    if not (config.has("vocab_size") and config.has("hidden_size")):
        return None
    if model_type == "opt":
        return _count_opt(config)
    traits = GATED.get(model_type)
    if traits is None or not config.has(traits.expert_key or "intermediate_size") or _is_beyond_formula(config):
        return None
    if traits.expert_key is not None and config.present(*NUM_EXPERTS_KEYS) is None:
        return None
    return _count_gated(config, traits)


def _is_beyond_formula(config: ModelConfig) -> bool:
    """Return whether a config uses an option that the formula of the gated families does not cover."""
    has_biases = config.flag("attention_bias", default=False) or config.flag("mlp_bias", default=False)
    return has_biases or bool(config.values.get("mlp_only_layers")) or config.count_or(1, "decoder_sparse_step") > 1


def _count_gated(config: ModelConfig, traits: _Traits) -> ParameterCount:
    hidden = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    num_heads = config.count("num_attention_heads")
    head_dim = config.count_or(hidden // num_heads, "head_dim")
    query_width = num_heads * head_dim
    kv_width = 2 * config.count_or(num_heads, "num_key_value_heads") * head_dim
    layer = hidden * (2 * query_width + kv_width) + traits.num_norms * hidden
    layer += query_width + kv_width if traits.has_qkv_bias else 0
    layer += 2 * head_dim if traits.has_qk_norm else 0
    expert = GATED_MATRICES * hidden * config.count(traits.expert_key or "intermediate_size")
    num_experts = num_used = 1
    if traits.expert_key is not None:
        num_experts = config.count(*NUM_EXPERTS_KEYS)
        num_used = config.count(*EXPERTS_A_TOKEN_KEYS, most=num_experts)
        layer += hidden * num_experts
    num_tables = 1 if config.flag("tie_word_embeddings", default=traits.ties_embeddings) else 2
    rest = num_layers * layer + num_tables * config.count("vocab_size") * hidden + hidden
    return ParameterCount(rest + num_layers * num_experts * expert, rest + num_layers * num_used * expert)


def _count_opt(config: ModelConfig) -> ParameterCount | None:
    hidden = config.count("hidden_size")
    if not config.has("ffn_dim") or config.count_or(hidden, "word_embed_proj_dim") != hidden:
        return None
    ffn = config.count("ffn_dim")
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * ffn + ffn + hidden
    norms = 2 * 2 * hidden
    positions = config.count("max_position_embeddings") + OPT_EXTRA_POSITIONS
    embeddings = (config.count("vocab_size") + positions) * hidden
    num_parameters = config.count("num_hidden_layers") * (attention + mlp + norms) + embeddings + 2 * hidden
    return ParameterCount(num_parameters, num_parameters)
