"""Tiny models of any type of transformers' decoders, from the default config with small sizes in place of large ones.

The name of a size decides its small value. Layers of several kinds alternate in the order in which the default config
first names the kinds. Where a family cannot be made so, it has settings of its own; some are tried with as many key
heads as query heads, since they have no others.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from tests.engine.families import CONFIGS, make_model, shake

__all__ = ["MOST_PARAMETERS", "NotMadeError", "make_tiny"]

Settings = dict[str, Any]

MOST_PARAMETERS: Final = 8_000_000
MOST_TOLD: Final = 160
NUM_LAYERS: Final = 4
WIDTH: Final = 32
EXTENT: Final = 12

WIDTHS: Final = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim", "lru_width")
INNER: Final = (
    "intermediate_size",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "ffn_dim",
    "ffn_hidden_size",
    "expert_ffn_hidden_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "shared_intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "d_inner",
    "dff",
    "dim_ff",
)
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
HEADS: Final = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
    "swa_num_attention_heads",
    "linear_num_value_heads",
    "linear_num_heads",
    "mamba_n_heads",
    "mamba_num_heads",
    "n_mamba_heads",
)
KEY_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "swa_num_key_value_heads",
    "linear_num_key_heads",
    "n_head_kv",
)
HEAD_WIDTHS: Final = (
    "head_dim",
    "swa_head_dim",
    "swa_v_head_dim",
    "global_head_dim",
    "v_head_dim",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "dim_head",
    "index_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_head_dim",
    "kv_channels",
    "rotary_dim",
    "attention_head_size",
)
EXTENTS: Final = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention")
EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
OTHERS: Final[Settings] = {
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "max_target_positions": 512,
    "max_source_positions": 16,
    "encoder_layers": NUM_LAYERS,  # some count the cache's layers by these
    "num_encoder_layers": NUM_LAYERS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "attention_chunk_size": 16,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "index_topk": 8,
    "index_n_heads": 32,
    "adapter_rank": 4,
    "rel_extent": 64,
    "tie_word_embeddings": False,
    "use_mamba_kernels": False,
    "is_decoder": True,
    "dropout": 0.0,
}
"""Of these only what a config has is set."""
KINDS: Final = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
OWN: Final[dict[str, Settings]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {**CONFIGS["deepseek_v3"], "head_dim": 8},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": NUM_LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": NUM_LAYERS},
    "mamba2": {"num_heads": 4, "head_dim": 16, "hidden_size": WIDTH, "expand": 2, "n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * NUM_LAYERS},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "sliding_window": EXTENT, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
}
"""What some families need beside."""


class NotMadeError(Exception):
    """No tiny model of a type could be made: why the likeliest attempt failed."""


def make_tiny(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Make a model of a type; the first one as the tests do where they have it.

    Raises:
        NotMadeError: nothing that was tried gives a model of at most :data:`MOST_PARAMETERS` that continues a prompt.
    """
    if model_type in CONFIGS and seed == 0:
        return make_model(model_type)
    problems = []
    try:
        attempts = list(_attempts(model_type))
    except Exception as problem:
        raise NotMadeError(f"its default config is none: {_told(problem)}") from problem
    for settings in attempts:
        try:
            return _make(model_type, settings, seed)
        except Exception as problem:  # noqa: BLE001 - of any kind: it is reported if nothing else succeeds
            problems.append(_told(problem))
    raise NotMadeError(problems[0])


def _told(problem: Exception) -> str:
    """Describe an error of transformers on one line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:MOST_TOLD]}"


def _attempts(model_type: str) -> Iterator[Settings]:
    """Give settings of configs, the likeliest first."""
    own = OWN.get(model_type, {})
    default = AutoConfig.for_model(model_type)
    for num_key_heads in (2, 4):
        for with_kinds in (True, False):
            yield {**dict(_small(default, num_key_heads, with_kinds=with_kinds)), **own}


def _small(config: PreTrainedConfig, num_key_heads: int, *, with_kinds: bool) -> Iterator[tuple[str, Any]]:
    """Give the settings that make a config small."""
    sizes = dict(_sizes(num_key_heads))
    given = config.to_dict()
    for name, value in given.items():
        if name in config.sub_configs:
            part = getattr(config, name)
            if part is not None:
                yield name, dict(_small(part, num_key_heads, with_kinds=with_kinds))
        elif name in KINDS:
            if with_kinds and isinstance(value, list) and value:
                yield name, _alternating([*_kinds_of_positions(given), *value] if name == "layer_types" else value)
        elif name in sizes and not (value is None and name not in {"head_dim", "num_key_value_heads"}):
            yield name, _shaped(value, sizes[name])


def _kinds_of_positions(given: Settings) -> list[str]:
    """List the kinds of layers that a config gives positions for, whether or not it has layers of them."""
    rules = given.get("rope_parameters") or {}
    return [kind for kind, rule in rules.items() if isinstance(rule, dict) and kind.endswith("_attention")]


def _sizes(num_key_heads: int) -> Iterator[tuple[str, Any]]:
    for names, size in (
        (WIDTHS, WIDTH),
        (INNER, 48),
        (LAYERS, NUM_LAYERS),
        (HEADS, 4),
        (KEY_HEADS, num_key_heads),
        (HEAD_WIDTHS, WIDTH // 4),
        (EXTENTS, EXTENT),
        (EXPERTS, 4),
    ):
        yield from ((name, size) for name in names)
    yield from OTHERS.items()


def _shaped(value: object, size: object) -> object:
    """Give a size by layer where the default config does."""
    if size is None:
        return None
    return [size] * NUM_LAYERS if isinstance(value, list | tuple) else size


def _alternating(kinds: Iterable[str]) -> list[str]:
    """Let layers of each kind come in turn."""
    distinct = list(dict.fromkeys(kinds))
    return [distinct[layer % len(distinct)] for layer in range(NUM_LAYERS)]


def _make(model_type: str, settings: Mapping[str, Any], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **settings)
    factory = cast("Any", AutoModelForCausalLM)
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in factory.from_config(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters")
    has_caps = "attn_logit_softcapping" in config.get_text_config(decoder=True).to_dict()
    attention = {"attn_implementation": "eager"} if has_caps else {}
    model = cast("PreTrainedModel", factory.from_config(config, dtype=torch.float32, **attention).eval())
    shake(model, torch.Generator().manual_seed(seed + 1))
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)  # some forbid or force tokens
    with torch.inference_mode():
        cast("Any", model).generate(torch.tensor([[3, 5, 7]]), max_new_tokens=2, do_sample=False)
    return model
