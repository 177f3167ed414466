"""Tokenizers asked in Rust: the same tokens and texts as by transformers, or not asked at all."""

from typing import Any, Final, cast

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedkv.engine.llm import plain_encoding
from pagedkv.probe import compat
from tests.server.serving import SPECIAL, byte_tokenizer

UNKNOWN: Final = "[UNK]"


def fast(rust: Tokenizer, **more: object) -> Any:  # noqa: ANN401 - of transformers
    """Wrap a tokenizer."""
    return cast("Any", PreTrainedTokenizerFast)(
        tokenizer_object=rust, **{"clean_up_tokenization_spaces": False, "unk_token": UNKNOWN, **more}
    )


def words(**more: object) -> Any:  # noqa: ANN401 - as above
    """Make a tokenizer of pieces of words."""
    pieces = [UNKNOWN, "[SEP]", "a", "b", "##a", "##b", ".", "do", "n", "'", "t", "ü"]
    rust = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(cleanup=False)
    rust.add_special_tokens(["[SEP]"])
    return fast(rust, **more)


def marked_blanks() -> Any:  # noqa: ANN401 - as above
    """Make a tokenizer that marks blanks, and falls back on bytes."""
    pieces = [UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ä"]
    merges = [("▁", "a")]
    rust = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)}, merges, unk_token=UNKNOWN, byte_fallback=True
        )
    )
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(rust)


TOKENIZERS = {"bytes": byte_tokenizer(), "words": words(), "blanks": marked_blanks()}
TEXTS = st.lists(st.sampled_from([*SPECIAL, "[SEP]", "a", "ab", " ", "ä", "é€😀", "don't", ".", "x"])).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_tokens_are_those_of_transformers(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert compat.rust_tokenizer(tokenizer) is not None
    assert plain_encoding(tokenizer)(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), keeps_special=st.booleans())
def test_texts_are_those_of_transformers(name: str, data: st.DataObject, keeps_special: bool) -> None:  # noqa: FBT001 - drawn
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1)))
    rust = compat.rust_tokenizer(tokenizer)
    assert rust is not None
    text = tokenizer.decode(ids, skip_special_tokens=not keeps_special)
    assert rust.decode(ids, skip_special_tokens=not keeps_special) == text


def test_a_text_is_whole_after_another_was_cut_and_padded() -> None:
    tokenizer = byte_tokenizer()
    encode = plain_encoding(cast("Any", tokenizer))
    tokenizer.pad_token = SPECIAL[0]
    tokenizer("long", truncation=True, max_length=2, padding="max_length")
    assert encode("longer") == tokenizer.encode("longer", add_special_tokens=False)
    tokenizer("long", padding="max_length", max_length=9)
    assert len(encode("longer")) == 6


def test_who_changes_texts_or_tokens_is_asked_himself() -> None:
    class Shouting(PreTrainedTokenizerFast):
        """Changes texts."""

        def _decode(self, *args: Any, **more: Any) -> str:  # noqa: ANN401 - as transformers has it
            return super()._decode(*args, **more).upper()

    rust = TOKENIZERS["bytes"].backend_tokenizer
    assert compat.rust_tokenizer(cast("Any", Shouting)(tokenizer_object=rust)) is None
    assert compat.rust_tokenizer(words(clean_up_tokenization_spaces=True)) is None
    assert compat.rust_tokenizer(words(split_special_tokens=True)) is None
    assert compat.rust_tokenizer(None) is None
    assert plain_encoding(words(split_special_tokens=True))("a[SEP]") != plain_encoding(words())("a[SEP]")


def test_a_clean_up_that_transformers_leaves_out_does_not_matter() -> None:
    """Byte-level tokenizers ask for it in many models' files."""
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.encode("a , b .", add_special_tokens=False)
    rust = compat.rust_tokenizer(tokenizer)
    assert rust is not None
    assert rust.decode(ids) == tokenizer.decode(ids) == "a , b ."
