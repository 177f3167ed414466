"""A model for benchmarks of a server: it takes any text of up to 32,768 tokens, each a byte, and answers with letters.

Its weights are random, the same each time, so that its answers mean nothing; they have no end, so that they are as long
as they may be. Its head favours letters and blanks, since clients that measure answers count pieces of text.
"""

from typing import Any, Final

import torch

from pagedkv.engine.llm import Tokenizer
from pagedkv.engine.loading import usable_device
from pagedkv.probe import compat

NUM_BYTES: Final = 256
SPECIAL: Final = ("<s>", "</s>")
TEMPLATE: Final = """\
{{- bos_token -}}
{%- for message in messages -%}{{ message['role'] + ': ' + (message['content'] or '') + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
CONFIG: Final = {
    "vocab_size": NUM_BYTES + len(SPECIAL),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "bos_token_id": NUM_BYTES,
    "eos_token_id": NUM_BYTES + 1,
}
WRITTEN: Final = "abcdefghijklmnopqrstuvwxyz "
SHARPNESS: Final = 10.0
"""Standard deviation of the logits of what is written; those of all other tokens are 0."""


def load_babbling(device: str = "auto") -> tuple[compat.Model, Tokenizer]:
    """Make the model and its tokenizer.

    Args:
        device: for its weights and blocks, as of :func:`~pagedkv.engine.loading.usable_device`; with ``auto``
            it is on the CPU, which is fast enough for it.

    Raises:
        ConfigurationError: there is no such device.
    """
    tokenizer = babbling_tokenizer()
    ids = list(tokenizer.encode(WRITTEN))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = compat.make_llama(CONFIG)
        written = torch.randn(len(WRITTEN), int(CONFIG["hidden_size"]))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[ids] = written * SHARPNESS / int(CONFIG["hidden_size"]) ** 0.5
    return model if device == "auto" else model.to(usable_device(device)), tokenizer


def babbling_tokenizer() -> Tokenizer:
    """Make the tokenizer alone."""
    tokenizer: Tokenizer = compat.byte_tokenizer(SPECIAL, TEMPLATE)
    return tokenizer
