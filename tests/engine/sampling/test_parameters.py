"""Parameters of a request: valid values are taken, absurd and contradictory ones are refused by name."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedkv.engine.sampling import SampledSequence, SamplingParams
from pagedkv.errors import RequestError, TokenError


def test_by_default_the_most_likely_token_is_taken() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 0.0, 0, 1.0, 0.0)
    assert params.is_greedy
    assert not SamplingParams(temperature=1.0, top_p=0.9).is_greedy


def test_greedy_samples_may_be_several() -> None:
    assert SamplingParams(n=2).is_greedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": True}, "n must be an integer"),
        ({"n": 2.0, "temperature": 0}, "n must be an integer"),
        ({"top_p": 0.9}, "top_p=0.9 with temperature=0 would change nothing: set a temperature above 0"),
        ({"top_k": 5}, "top_k=5 with temperature=0"),
        ({"min_p": 0.1}, "min_p=0.1 with temperature=0"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"temperature": 1e-9}, "temperature must be 0 for greedy sampling or at least 0.0001"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_p": 0}, "top_p must lie above 0"),
        ({"top_p": 1.01}, "top_p must lie above 0 and be at most 1, got 1.01"),
        ({"min_p": -0.1}, "min_p must lie between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be finite"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be finite"),
        ({"frequency_penalty": None}, "frequency_penalty must be a number"),
        ({"bad_words": "word"}, "bad_words must be a list"),
        ({"bad_words": [""]}, "a bad word must have a character"),
        ({"bad_words": [[]]}, "a bad word must have at least one token id"),
        ({"bad_words": [[-1]]}, "a token id of bad_words must be at least 0"),
        ({"bad_words": [3]}, "a bad word must be a list"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {-1: 0.5}}, "a token id of logit_bias"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\] must be a finite number or -inf"),
        ({"logit_bias": {1: float("inf")}}, r"logit_bias\[1\] must be a finite number or -inf"),
        ({"min_tokens": -1}, "min_tokens must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4"),
        ({"stop": [""]}, "a stop text must be a text with at least one character"),
        ({"stop": [3]}, "a stop text must be a text"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids must be at most"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**63}, "seed must be at most"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"prompt_logprobs": 5000}, "prompt_logprobs must be at most 1024"),
        ({"logits_processors": [3]}, "a logits processor must be callable"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**arguments)


def test_values_are_made_plain() -> None:
    params = SamplingParams(
        top_k=-1,
        temperature=np.float32(0.5),  # type: ignore[arg-type] # as callers bring them
        stop="end",
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        bad_words=["word", [1, 2]],
        logit_bias={5: -float("inf"), np.int64(6): 1},  # type: ignore[dict-item]
    )
    assert (params.top_k, params.temperature, params.stop) == (0, 0.5, ("end",))
    assert params.stop_token_ids == (3, 4)
    assert params.bad_words == ("word", (1, 2))
    assert dict(params.logit_bias) == {5: -float("inf"), 6: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 0.0  # type: ignore[index] # that is the point


def test_they_can_be_copied_and_pickled() -> None:
    params = SamplingParams(seed=4, logit_bias={5: 1.5}, stop=["a"], bad_words=[[3, 4]])
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params) == params  # noqa: S301 - ours


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias names tokens 10 to 10, but the vocabulary of 10 has 0 to 9"),
        (SamplingParams(bad_words=[[3, 12]]), "bad_words names tokens 3 to 12"),
        (SamplingParams(stop_token_ids=[10]), "stop_token_ids names tokens"),
        (SamplingParams(bad_words=["text"]), "turn bad words into token ids first"),
    ],
)
def test_what_the_vocabulary_lacks_is_refused_where_a_sequence_begins(params: SamplingParams, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SampledSequence(params, [1], vocab_size=10)


def test_tokens_outside_of_the_vocabulary_are_refused_and_change_nothing() -> None:
    sequence = SampledSequence(SamplingParams(repetition_penalty=2.0), [1], vocab_size=10)
    with pytest.raises(TokenError, match="must lie between 0 and 9, got 3 to 10"):
        sequence.append([3, 10])
    with pytest.raises(TokenError, match="num_generated must be at most 0"):
        sequence.truncate(1)
    with pytest.raises(TokenError, match="at least one token"):
        SampledSequence(SamplingParams(), [], vocab_size=10)
    assert sequence.num_generated == 0
    assert sequence.counts().token_ids.tolist() == [1]
