"""NewTokens: one token of an answer that goes on is told as a number, all other news whole."""

from dataclasses import replace
from typing import Final

import pytest

from pagedkv.engine import LLM, SamplingParams
from pagedkv.engine.answer_stream import NewTokens
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS

NUM_NEW: Final = 8
PLAIN: Final = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "num_told"),
    [
        (PLAIN, NUM_NEW - 1),
        (replace(PLAIN, logprobs=1), 0),
        (replace(PLAIN, n=2, temperature=1.0), 0),
        (replace(PLAIN, max_tokens=1), 0),
    ],
)
def test_a_further_token_is_told_as_a_number_and_other_news_whole(params: SamplingParams, num_told: int) -> None:
    llm = LLM(make_model("llama"), replace(CONFIG, num_blocks=200))
    (request,) = llm.submit([PROMPTS[0]], params)
    news, whole, numbers, told = NewTokens(request), NewTokens(request), 0, []
    while llm.core.has_work:
        llm.step()
        expected = whole.take()
        token_id = news.take_one()
        if token_id is None:
            assert news.take() == expected, "nothing was taken"
        else:
            numbers += 1
            assert [(each.token_ids, each.finish_reason) for each in expected] == [((token_id,), None)]
        told.append(token_id)
    assert numbers == num_told
    assert told[-1] is None, "an end is told whole"
    assert news.take_one() is None
    assert news.take() == ()
