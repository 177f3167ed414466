"""Tokenizers of transformers made here: a word a token, and a chat template."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["UNKNOWN", "make_tokenizer"]

UNKNOWN = "[unk]"


def make_tokenizer(words: Mapping[str, int], template: str | None) -> Any:  # noqa: ANN401 - of transformers
    """Make one of a vocabulary with :data:`UNKNOWN`, whose words stand between blanks."""
    made = Tokenizer(models.WordLevel(dict(words), unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=UNKNOWN)
    tokenizer.chat_template = template
    return tokenizer
