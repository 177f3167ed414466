"""When an answer ends: by token, text or length; the same whether tokens come one by one or several at once."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pagedkv.engine.sampling import Ending, FinishReason, SamplingParams, StopDetector
from pagedkv.engine.sampling.sequence import AnswerText
from pagedkv.errors import RequestError

PIECES = ["a", "b", "ab", "ba", "aab", " c", "é", "\n"]
BYTES = [bytes([byte]) for byte in "é€😀".encode()]
"""Tokens of one byte, as a tokenizer has them for characters that it has no token for."""


def decode(token_ids: Sequence[int]) -> str:
    """Decode as a byte-level tokenizer does: pieces and lone bytes are joined, then read as UTF-8."""
    pieces = [PIECES[token].encode() if token < len(PIECES) else BYTES[token - len(PIECES)] for token in token_ids]
    return b"".join(pieces).decode("utf-8", errors="replace")


def strips_first_space(token_ids: Sequence[int]) -> str:
    """Decode as a tokenizer of the SentencePiece kind: what begins a text loses its space."""
    return decode(token_ids).removeprefix(" ")


def detector(params: SamplingParams, stop_ids: frozenset[int] = frozenset()) -> StopDetector:
    return StopDetector(params, stop_ids, decode, max_tokens=100)


def test_an_answer_ends_at_its_length() -> None:
    follows = detector(SamplingParams(max_tokens=3))
    assert follows.append([0, 1]) is None
    assert follows.append([0, 1]) == Ending(FinishReason.LENGTH, 3, None)
    assert follows.text == "aba"
    assert StopDetector(SamplingParams(max_tokens=50), frozenset(), max_tokens=2).append([0, 1]) == Ending(
        FinishReason.LENGTH, 2, None
    )


def test_an_answer_ends_at_a_token_whose_text_it_does_not_have() -> None:
    follows = detector(SamplingParams(), frozenset({4}))
    assert follows.append([0, 1, 4, 0]) == Ending(FinishReason.STOP, 3, 4)
    assert follows.text == "ab"
    assert follows.append([1]) == Ending(FinishReason.STOP, 3, 4)
    assert follows.text == "ab"


def test_it_may_not_end_by_itself_before_its_least_length() -> None:
    follows = detector(SamplingParams(min_tokens=3, stop="b"), frozenset({4}))
    assert follows.append([1, 4]) is None
    assert follows.append([0]) is None
    assert follows.append([1]) == Ending(FinishReason.STOP, 4, "b")
    assert follows.text == "baaba"


def test_a_stop_text_is_found_across_tokens_and_cut_off() -> None:
    follows = detector(SamplingParams(stop=["abba", "zz"]))
    assert follows.append([5, 2, 1]) is None
    assert follows.text == " cabb"
    assert follows.append([3]) is None or follows.ending is not None
    assert follows.append([0]) == follows.ending
    ended = detector(SamplingParams(stop=["abba", "zz"]))
    assert ended.append([5, 2, 1, 0]) == Ending(FinishReason.STOP, 4, "abba")
    assert ended.text == " c"


def test_of_stop_texts_in_one_token_the_first_that_is_complete_counts() -> None:
    assert detector(SamplingParams(stop=["b", "a"])).append([4]) == Ending(FinishReason.STOP, 1, "a")
    follows = detector(SamplingParams(stop=["b", "ab", "aab"]))
    assert follows.append([4]) == Ending(FinishReason.STOP, 1, "aab"), "complete at once: the one that began first"
    assert follows.text == ""


def test_a_character_of_several_tokens_is_told_when_it_is_whole() -> None:
    text = AnswerText(decode)
    euro = [len(PIECES) + index for index in range(2, 5)]
    assert [text.append(token) for token in (0, *euro, 1)] == ["a", "", "", "€", "b"]
    follows = detector(SamplingParams(stop="€"))
    assert follows.append([0, *euro[:2]]) is None
    assert follows.append(euro[2:]) == Ending(FinishReason.STOP, 4, "€")


def test_an_answer_that_ends_inside_of_a_character_says_so() -> None:
    follows = detector(SamplingParams(max_tokens=2))
    assert follows.append([0, len(PIECES)]) == Ending(FinishReason.LENGTH, 2, None)
    assert follows.text == "a�"


def test_bytes_that_never_become_a_character_do_not_hold_the_text_for_ever() -> None:
    text = AnswerText(decode)
    broken = len(PIECES)  # the first of two bytes, again and again
    assert any(text.append(broken) for _ in range(10))


def test_text_is_not_put_together_from_tokens_decoded_alone() -> None:
    text = AnswerText(strips_first_space)
    for token in (5, 5, 0):
        text.append(token)
    assert text.text == "c ca"
    text = AnswerText(strips_first_space)
    for tokens in ((5, 5), (0, 5, 0), (5,), (5, 0)):
        text.extend(tokens)
    assert text.text == "c ca ca c ca"


@given(st.lists(st.lists(st.integers(0, len(PIECES) + len(BYTES) - 1), max_size=7), max_size=8))
def test_the_text_of_several_tokens_is_that_of_each_in_turn(parts: list[list[int]]) -> None:
    each_in_turn, in_parts = AnswerText(decode), AnswerText(decode)
    for part in parts:
        in_parts.extend(part)
        for token in part:
            each_in_turn.append(token)
    for text in (each_in_turn, in_parts):
        text.finish()
    whole = decode([token for part in parts for token in part])  # many lone bytes in turn are told too early
    assert in_parts.text in {each_in_turn.text, whole}


@given(
    st.lists(st.integers(0, len(PIECES) + len(BYTES) - 1), max_size=20),
    st.lists(st.sampled_from(["a", "ab", "bb", "aba", "é", "\n c"]), max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_answers_are_those_of_looking_at_the_whole_text_after_each_token(
    token_ids: list[int], stops: list[str], sizes: list[int], min_tokens: int
) -> None:
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=15)
    at_once, in_parts = detector(params), detector(params)
    at_once.append(token_ids)
    start = 0
    while start < len(token_ids):
        size = sizes[start % len(sizes)]
        in_parts.append(token_ids[start : start + size])
        start += size
    assert (at_once.ending, at_once.text) == (in_parts.ending, in_parts.text)
    if at_once.ending is None or isinstance(at_once.ending.stop, str):
        whole = decode(token_ids[: at_once.ending.num_tokens if at_once.ending else None])
        assert whole.startswith(at_once.text)
    if at_once.ending is not None and isinstance(at_once.ending.stop, str):
        assert whole.startswith(at_once.text + at_once.ending.stop)
        assert at_once.ending.num_tokens >= min_tokens
    if not min_tokens:
        assert not any(stop in at_once.text for stop in stops)


def test_a_fork_ends_by_itself() -> None:
    follows = detector(SamplingParams(stop="bb"))
    follows.append([1])
    fork = follows.fork()
    assert fork.append([1]) == Ending(FinishReason.STOP, 2, "bb")
    assert follows.append([0]) is None
    assert (follows.text, fork.text) == ("ba", "")


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(RequestError, match=r"the stop texts \['b'\] need a tokenizer"):
        StopDetector(SamplingParams(stop="b", max_tokens=3), frozenset())
    with pytest.raises(RequestError, match="an answer needs a limit"):
        StopDetector(SamplingParams(), frozenset(), decode)
