"""What tests of grammars share: a byte-level tokenizer, answers drawn at random within a matcher's masks."""

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedkv.engine.sampling import TokenMatcher
from pagedkv.engine.sampling.foreign import NotReady

MARKERS: Final = ("<tool_call>", "</tool_call>", "</think>")
END: Final = 256
VOCAB_SIZE: Final = 300
MOSTLY: Final = 0.9
CLOSES: Final = 0.1
CLOSERS: Final = '"}]:,<;'


def byte_tokenizer(*markers: str) -> Tokenizer:
    """Make a tokenizer with a token for each byte (0 to 255), one that ends answers (256), and one for each marker."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *markers])
    return tokenizer


def allowed(matcher: TokenMatcher, token_ids: list[int]) -> list[int]:
    """List the tokens that a matcher allows behind these."""
    mask = matcher.allowed_tokens(token_ids)
    assert not isinstance(mask, NotReady)
    if mask.dtype == torch.bool:
        assert mask.shape == (VOCAB_SIZE,)
        return [int(token) for token in mask.nonzero()]
    assert mask.dtype == torch.int32
    assert mask.shape == (-(-VOCAB_SIZE // 32),)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return [int(token) for token in bits.nonzero()[0]]


def draw(
    matcher: TokenMatcher, tokenizer: Tokenizer, seed: int, longest: int = 2000, closing: Sequence[str] = ("",)
) -> str:
    """Draw an answer, tokens that end strings and lists more often than others; its text with markers.

    At times one of the closing texts is spelled byte by byte, as far as that is allowed.
    """
    chance = random.Random(seed)
    blanks = {token for sign in " \t\r\n" for token in tokenizer.encode(sign).ids}
    closers = [token for sign in CLOSERS for token in tokenizer.encode(sign).ids]
    token_ids: list[int] = []
    while True:
        for sign in chance.choice(closing) if chance.random() < CLOSES else "":
            (token,) = tokenizer.encode(sign).ids
            if token not in allowed(matcher, token_ids):
                break
            token_ids.append(token)
        choices = allowed(matcher, token_ids)
        if chance.random() < MOSTLY:
            choices = [token for token in choices if token not in blanks] or choices
        ending = [token for token in choices if token in closers or token >= END]
        token = chance.choice(ending if ending and chance.random() < 0.5 else choices)
        if token == END:
            return str(tokenizer.decode(token_ids, skip_special_tokens=False))
        token_ids.append(token)
        assert len(token_ids) < longest, "the answer does not end"
