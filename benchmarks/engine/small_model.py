"""The model of the engine's benchmarks on a CPU: a Llama of 4 layers and 256 dimensions with random weights."""

from typing import Final, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["VOCABULARY", "make_model"]

VOCABULARY: Final = 2048


def make_model(longest: int = 1024, num_layers: int = 4) -> LlamaForCausalLM:
    """Make the model, for sequences of so many tokens, perhaps with more layers; its answers are varied."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return cast("LlamaForCausalLM", LlamaForCausalLM(config).eval())
