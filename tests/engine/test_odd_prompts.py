"""Prompts and wishes of any kind: answered as they are, or refused by an error of ours; never narrowed to others."""

from typing import Any, Final

import numpy as np
import pytest
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, SamplingParams, TokensPrompt
from pagedkv.errors import PagedKVError, RequestError
from tests.odd_arguments import NO_ARRAYS, NO_NUMBERS, ODD

CONFIG: Final = EngineConfig(block_size=4, num_blocks=40, max_sequences=4, max_tokens=60, self_test=False)
PARAMS: Final = SamplingParams(max_tokens=2)
NO_PROMPTS: Final = {**NO_NUMBERS, **NO_ARRAYS}


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel) -> LLM:
    return LLM(model, CONFIG)


@pytest.mark.parametrize("what", NO_PROMPTS)
def test_what_is_no_list_of_token_ids_is_refused_by_every_door(llm: LLM, what: str) -> None:
    prompt: Any = NO_PROMPTS[what]
    for given in (prompt, TokensPrompt(prompt)):
        for door in (llm.generate, llm.submit, lambda prompts, params: list(llm.stream(prompts, params))):
            with pytest.raises(RequestError, match="prompt 1"):
                door([[1, 2], given], PARAMS)
    with pytest.raises(RequestError):
        llm.core.add(prompt, PARAMS)
    assert not llm.core.has_work


@pytest.mark.parametrize("token", [2**32 + 5, 2**31, -1, 2**64 + 5, np.int64(2**32 + 5), np.uint64(2**64 - 1)])
def test_a_token_that_no_vocabulary_has_is_not_taken_for_another(llm: LLM, token: int) -> None:
    """``2**32 + 5`` was answered for as token 5."""
    prompts: list[Any] = [[token, 7], np.array([token, 7]), (7, token)]
    for prompt in prompts:
        with pytest.raises(RequestError):
            llm.generate([prompt], PARAMS)
        with pytest.raises(RequestError):
            llm.core.add(prompt, PARAMS)


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_token_ids_of_any_integer_type_are_answered_alike(llm: LLM, kind: type[np.integer[Any]]) -> None:
    expected = llm.generate([[5, 7, 9]], PARAMS)[0].token_ids
    prompt: Any = np.array([5, 7, 9], kind)
    assert [output.token_ids for output in llm.generate([prompt, (5, 7, 9)], PARAMS)] == [expected] * 2


@pytest.mark.parametrize("what", ODD)
def test_odd_lists_of_prompts_and_of_wishes_get_an_error_of_ours(llm: LLM, what: str) -> None:
    value: Any = ODD[what]
    for prompts, params in ((value, PARAMS), ([[1, 2]], value), ([[1, 2]], [value])):
        try:
            llm.generate(prompts, params)
        except PagedKVError:
            assert not llm.core.has_work
