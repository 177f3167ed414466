"""read_model(): turns a preset's name or a config.json into a ModelMemory, without torch.

It determines which of the two the user means, and combines the parts: rules and sizes of the layers become groups. What
it does not understand it refuses: every fault is a ConfigurationError with file, key, expectation and remedy. Where
torch and transformers are installed, :func:`pagedkv.planner.models.read_model` knows the types that are not here.

Weights are counted, if the config determines them, matrix by matrix for families whose published counts equal these
formulas to the last weight (OPT, Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 2; the tests compare them with the counts
in the published checkpoints). For all others the result is None, since a guess would look like a count. Of a multimodal
model only the language model is counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.models.config import COMPARE, ModelConfig, read_json_object
from pagedkv.models.families import Family, family_of
from pagedkv.models.layer_rules import KINDS, LayerRule, LayerRules, is_state, listed_rules
from pagedkv.models.memory import (
    LayerGroup,
    ModelMemory,
    group_name,
    kv_element_nbytes,
    model_element_nbytes,
    weights_nbytes,
)
from pagedkv.models.presets import model_names, preset

CONFIG_FILE: Final = "config.json"
NUM_SUGGESTIONS: Final = 3
LEAST_LIKENESS: Final = 0.4


def read_model(name_or_path: str, kv_dtype: str | None = None) -> ModelMemory:
    """Read the memory of a model.

    Args:
        name_or_path: a preset's name (:func:`~pagedkv.models.model_names` lists them, in any case of letters),
            the path of a ``config.json``, or a folder with one. A preset takes precedence; ``./name`` is always a path.
        kv_dtype: type of keys and values: "auto" or None for the model's own, "fp8", "bfloat16", "float16" or
            "float32"; "bf16", "fp16" and "fp32" are the same words.
            States of recurrent layers keep their own type.

    Raises:
        ConfigurationError: there is no such preset or file, or the config is not understood.

    >>> read_model("llama-3.1-8b").token_nbytes
    131072
    """
    if is_preset(name_or_path):
        return preset(name_or_path.lower(), kv_dtype)
    return memory_by_table(name_or_path, read_config(name_or_path), kv_dtype)


def is_preset(name: str) -> bool:
    """Return whether a name is that of a preset, in any case of letters."""
    return name.lower() in model_names()


def read_config(name_or_path: str) -> ModelConfig:
    """Read a ``config.json``, by its path or that of its folder. Raises ConfigurationError as :func:`read_model`."""
    path = _config_path(name_or_path)
    return ModelConfig(str(path), read_json_object(path))


def _config_path(name_or_path: str) -> Path:
    path = Path(name_or_path)
    try:
        if path.is_dir():
            return path / CONFIG_FILE
        if path.exists():
            return path
    except OSError:
        pass  # the name is too long for a path
    raise ConfigurationError(
        f"{name_or_path[:100]!r} is neither a model preset nor a {CONFIG_FILE} or a folder with one. "
        f"Nearest presets: {', '.join(_nearest(name_or_path))}; "
        "`pagedkv presets` lists all of them"
    )


def _nearest(name: str) -> list[str]:
    """Return presets that a user may have meant, comparing names of repositories on the hub too."""
    last_part = name[-100:].lower().rpartition("/")[2]
    return get_close_matches(last_part, model_names(), NUM_SUGGESTIONS, LEAST_LIKENESS) or ["llama-3.1-8b"]


def memory_by_table(name: str, whole: ModelConfig, kv_dtype: str | None) -> ModelMemory:
    """Size a model of one of the types that the table of families has. Raises ConfigurationError."""
    # The whole config is checked too: an encoder-decoder may be declared outside of the language model's part.
    config = whole.language_model()
    if whole.flag("is_encoder_decoder", default=False):
        config = whole
    family = family_of(config)
    config = config.with_defaults(family.defaults)
    rules = listed_rules(config) or family.rules(config)
    counted = count_parameters(config)
    return ModelMemory(
        name=name,
        num_parameters=None if counted is None else counted.num_parameters,
        num_active_parameters=None if counted is None else counted.num_active,
        expert_share=expert_share(config),
        weights_nbytes=None if counted is None else weights_nbytes(config, counted.num_parameters),
        dtype_nbytes=model_element_nbytes(config),
        max_context=config.optional_count("max_position_embeddings"),
        num_layers=len(rules),
        groups=_groups(config, family, rules, kv_element_nbytes(config, kv_dtype)),
    )


def _groups(config: ModelConfig, family: Family, rules: LayerRules, element_nbytes: int) -> tuple[LayerGroup, ...]:
    present = sorted(set(rules), key=lambda rule: (KINDS.index(rule.kind), rule.extent))
    return tuple(_group(config, family, rule, rules.count(rule), element_nbytes) for rule in present)


def _group(config: ModelConfig, family: Family, rule: LayerRule, num_layers: int, element_nbytes: int) -> LayerGroup:
    token_nbytes = state_nbytes = pair_flops = 0
    if is_state(rule.kind):
        if family.state_nbytes is None:
            raise config.fault(
                "layer_types",
                f"has linear attention, which is not known of the model_type {config.text('model_type')!r}",
                COMPARE,
            )
        state_nbytes = family.state_nbytes(config)
    else:
        kept = family.attention(config)
        token_nbytes, pair_flops = kept.token_numel * element_nbytes, kept.pair_flops
    return LayerGroup(
        name=group_name(rule.kind, rule.extent),
        kind=rule.kind,
        extent=rule.extent,
        num_layers=num_layers,
        token_nbytes=num_layers * token_nbytes,
        state_nbytes=num_layers * state_nbytes,
        pair_flops=num_layers * pair_flops,
    )


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
