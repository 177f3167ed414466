"""Guessing from what stands there already, against a search that is plainly right."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.engine import PromptLookup
from pagedkv.engine.guessing import LookupText
from pagedkv.errors import ConfigurationError


def search(lookup: PromptLookup, tokens: Sequence[int], most: int) -> list[int]:
    """Look for the longest run of last tokens first, from the end backwards; write down what follows, by hand."""
    for length in range(lookup.max_ngram, lookup.min_ngram - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                text = list(tokens)
                for _ in range(min(most, lookup.num_tokens)):
                    text.append(text[end])
                    end += 1  # noqa: PLW2901 - it walks on
                return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 8),
)
def test_it_finds_what_a_plain_search_finds(tokens: list[int], num: int, least: int, more: int, most: int) -> None:
    lookup = PromptLookup(num_tokens=num, max_ngram=least + more, min_ngram=least)
    assert lookup.propose(np.array(tokens, np.int32), most).tolist() == search(lookup, tokens, most)


def test_the_latest_of_the_longest_counts() -> None:
    tokens = np.array([1, 2, 3, 40, 9, 2, 3, 50, 9, 1, 2, 3], np.int32)
    assert PromptLookup(num_tokens=1).propose(tokens, 9).tolist() == [40]
    assert PromptLookup(num_tokens=2, max_ngram=2).propose(tokens, 9).tolist() == [50, 9]
    assert PromptLookup(min_ngram=3, max_ngram=4).propose(tokens[:8], 9).tolist() == []


def test_a_text_of_a_period_goes_on_as_it_did() -> None:
    assert PromptLookup(num_tokens=5).propose(np.array([7, 7], np.int32), 9).tolist() == [7] * 5
    assert PromptLookup(num_tokens=5).propose(np.array([1, 2, 1, 2], np.int32), 4).tolist() == [1, 2, 1, 2]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.lists(st.integers(0, 9)), max_size=8))
def test_a_text_grows_with_its_answer(prompt: list[int], parts: list[list[int]]) -> None:
    text, answer = LookupText(np.array(prompt, np.int32)), list[int]()
    for part in parts:
        answer += part * 20
        assert text.grown(answer).tolist() == prompt + answer


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"num_tokens": 0}, "num_tokens of a lookup"),
        ({"num_tokens": 65}, "num_tokens of a lookup"),
        ({"min_ngram": 0}, "min_ngram"),
        ({"min_ngram": 4}, "max_ngram is 3, which is less than min_ngram = 4"),
    ],
)
def test_numbers_out_of_range_are_refused(bad: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PromptLookup(**bad)
