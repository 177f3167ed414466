"""Tiny models of many families, made from configs with a fixed seed.

Random weights of the usual scale give logits that hardly depend on the context. So matrices are scaled up, norms and
biases shaken, until what is generated is varied and depends on what came long before.
"""

from typing import Any, Final, cast

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

__all__ = ["BASE", "CONFIGS", "MORE", "SPARSE", "make_model", "moved", "shake"]

Config = dict[str, Any]

BASE: Final[Config] = {
    "vocab_size": 199,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
GPT2: Final[Config] = {
    **{key: BASE[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "tie_word_embeddings": False,
}
EXPERTS: Final[Config] = {
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": 24,
}
MAMBA: Final[Config] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}

ATTENTION_ONLY: Final[dict[str, Config]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 12},
    "gemma": {},
    "gemma2": {"sliding_window": 12, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 12, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "gpt_oss": {
        **EXPERTS,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": 12},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "cohere2": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "logit_scale": 1.0,
    },
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1], "layer_types": ["full_attention"] * 3},
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 1, 0],
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        "floor_scale": 8,
        "attn_scale": 0.5,
        "attn_temperature_tuning": True,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 199,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    },
}

HYBRIDS: Final[dict[str, Config]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": MAMBA,
    "qwen3_next": {
        **EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [1]},
    "zamba2": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_head_dim": 16,
        "use_mem_rope": True,
        "adapter_rank": 4,
    },
    "granitemoehybrid": {
        **MAMBA,
        **EXPERTS,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "rope",
    },
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 8,
    },
}
INDEXER: Final[Config] = {
    **ATTENTION_ONLY["deepseek_v3"],
    "num_hidden_layers": 3,
    "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_topk": 8,
    "index_n_heads": 32,  # so many that no two keys have a score of zero, among which any order is right
    "index_head_dim": 16,
}
SPARSE: Final[dict[str, Config]] = {
    "axk2": {**INDEXER, "gated_norm_rank": 8},
    "deepseek_v32": INDEXER,
    "dots3_note_text": {
        **INDEXER,
        "n_group": 1,
        "shared_experts_intermediate_size": 24,
        "sliding_window": 12,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "per_layer_config": {},
        "head_dim": 16,
    },
    "deepseek_v4": {
        **INDEXER,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "n_routed_experts": 4,
        "sliding_window": 12,
        "index_topk": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["moe"] * 4,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "glm_moe_dsa": {**INDEXER, "indexer_types": ["full", "shared", "full"]},
    "hy_v4": {**INDEXER, "indexer_types": ["full", "full", "shared"], "hc_mult": 2},
    "qwen4_exp_text": {
        **HYBRIDS["qwen3_next"],
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "num_hidden_layers": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "eos_token_id": 198,
    },
}
"""An indexer selects 8 tokens of those before each; in Qwen4 four blocks of two, beside the last tokens."""
CONFIGS: Final[dict[str, Config]] = {**ATTENTION_ONLY, **HYBRIDS, **SPARSE}
MORE: Final[dict[str, Config]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "ctrl": {},
    "deepseek_v2": ATTENTION_ONLY["deepseek_v3"],
    "ernie4_5": {},
    "exaone4": {"sliding_window": 12},
    "gemma4_text": {},
    "glm": {},
    "glm4": {},
    "gpt_bigcode": {},
    "granitemoe": EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "minimax_m2": EXPERTS,
    "ministral": {"sliding_window": 12},
    "moshi": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": {"sliding_window": 12},
    "olmoe": EXPERTS,
    "persimmon": {},
    "phimoe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": HYBRIDS["qwen3_next"],
    "seed_oss": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 12},
    "vaultgemma": {"sliding_window": 12},
}
"""Families that are tried in the long tests alone."""

SEEDS: Final = {"nemotron_h": 1}
"""Of families whose first model often cannot choose between two tokens."""


NEW_FAMILIES: Final = ("dots3_note_text", "hy_v4", "qwen4_exp_text")
"""Which the oldest versions of transformers that are meant do not have, or have otherwise."""


def make_model(name: str, **changes: Any) -> PreTrainedModel:  # noqa: ANN401 - of configs
    """Make a tiny model of a family, with weights that mostly leave one clear choice of the next token.

    A test is skipped whose family this version of transformers does not have yet.
    """
    if name in NEW_FAMILIES and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"transformers {transformers.__version__} does not have this model yet")
    seed = SEEDS.get(name, 0)
    torch.manual_seed(seed)
    own = {**CONFIGS, **MORE}[name]
    # Transformers 5.16 takes SDPA for Gemma 2, which leaves soft caps out.
    attention = {"attn_implementation": "eager"} if "attn_logit_softcapping" in own else {}
    config = AutoConfig.for_model(name, **{**({} if own is GPT2 else BASE), **own, **changes})
    model = cast(
        "PreTrainedModel",
        cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.float32, **attention).eval(),
    )
    shake(model, torch.Generator().manual_seed(seed + 1))
    return model


def moved(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move a model to a device."""
    return cast("PreTrainedModel", cast("Any", model).to(device))


def shake(model: PreTrainedModel, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith(("A_log", "dt_bias")):
                continue
            if parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            else:
                fan_in = parameter.shape[-1] if parameter.ndim == 2 else parameter.shape[-2]
                is_table = "embed" in parameter_name or "wte" in parameter_name
                parameter.copy_(noise * (1.0 if is_table else 1.6 * fan_in**-0.5))
