"""Log-probabilities of tokens inside characters, of equal texts, and of tokens that are not among the most likely."""

from typing import Any

import httpx
import pytest

from pagedkv.engine import TokenLogprobs
from pagedkv.server.openai.token_texts import TokenTexts
from tests.server.conftest import Running
from tests.server.serving import TOKENIZER, tokens_of

TEXT = "é€x𝄞y"


def ask(server: Running, path: str, **more: object) -> Any:  # noqa: ANN401 - JSON
    """Ask for an answer that has characters of one to four bytes; return its only choice."""
    server.script.write("spell it", TEXT)
    asked = {"messages": [{"role": "user", "content": "spell it"}]} if "chat" in path else {"prompt": "spell it"}
    wish = {"model": "small", **asked, "max_tokens": 12, "ignore_eos": True, **more}
    answer = httpx.post(f"{server.url}{path}", json={**wish, "max_tokens": len(TEXT.encode())}, timeout=60).json()
    return answer["choices"][0]


def test_tokens_inside_a_character_have_their_own_bytes(server: Running) -> None:
    choice = ask(server, "/v1/chat/completions", logprobs=True, top_logprobs=2)
    assert choice["message"]["content"] == TEXT
    content = choice["logprobs"]["content"]
    assert bytes(byte for each in content for byte in each["bytes"]) == TEXT.encode()
    assert [each["token"] for each in content][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [each["token"] for each in content if each["bytes"] == [120]] == ["x"]


def test_offsets_count_characters_that_are_complete(server: Running) -> None:
    choice = ask(server, "/v1/completions", logprobs=2)
    assert choice["text"] == TEXT
    lengths = [len(character.encode()) for character in TEXT]
    expected = [at for at, length in enumerate(lengths) for _ in range(length)]
    assert choice["logprobs"]["text_offset"] == expected


def test_the_sampled_token_is_always_among_the_told_ones(server: Running) -> None:
    wish = {"model": "small", "prompt": "anything", "max_tokens": 30, "temperature": 2, "logprobs": 1, "seed": 3}
    told = httpx.post(f"{server.url}/v1/completions", json={**wish, "ignore_eos": True}, timeout=60).json()
    logprobs = told["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob in top.values()
        assert token in top or any(name.startswith("token_id:") for name in top)
        assert len(top) <= 2


def test_equal_texts_have_names_of_their_own() -> None:
    texts = TokenTexts(None, lambda token_ids: "same" if token_ids[0] < 3 else "other")
    each = TokenLogprobs(2, -3.0, 9, ((0, -1.0), (1, -2.0), (5, -2.5)))
    assert texts.by_text(each, 3) == {"same": -3.0, "token_id:0": -1.0, "token_id:1": -2.0, "other": -2.5}


@pytest.mark.parametrize(
    ("piece", "content"), [("<0xE4>", b"\xe4"), ("Ã", b"\xc3"), ("ĠÃ", b" \xc3"), ("▁", b"\xef\xbf\xbd")]
)
def test_bytes_are_those_of_the_piece(piece: str, content: bytes) -> None:
    class Pieces:
        def convert_ids_to_tokens(self, token_id: int) -> str:
            assert token_id == 7
            return piece

    assert TokenTexts(Pieces(), lambda _: "\ufffd").bytes_of(7) == content


def test_each_byte_has_its_letter() -> None:
    texts = TokenTexts(TOKENIZER, lambda token_ids: str(TOKENIZER.decode(list(token_ids))))
    for character in ("é", "€", "𝄞", " ", "~", "\n"):
        assert b"".join(map(texts.bytes_of, tokens_of(character, ends=False))) == character.encode()
