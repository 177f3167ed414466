"""An answer that another engine began is continued as that engine would have: tokens, stop, log-probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.engine import LLM, EngineConfig, Intent, RequestOutput, SamplingParams
from pagedkv.engine.answer_stream import NewTokens, TokenUpdate
from pagedkv.errors import RequestError
from tests.choosing import long_but
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, poison

NUM_NEW: Final = 12
FAMILIES: Final = ("llama", "gemma2", "falcon_h1")
ROOMY: Final = replace(CONFIG, num_blocks=200)
WISHES: Final = (
    SamplingParams(max_tokens=NUM_NEW),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.0, seed=5, presence_penalty=0.5, logprobs=1),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, seed=9, top_k=20, repetition_penalty=1.3, min_tokens=6,
                   stop_token_ids=list(range(0, 199, 5))),
)  # fmt: skip


class Begun:
    """A model, and its answers by an engine that was not disturbed."""

    def __init__(self, family: str) -> None:
        self.model = make_model(family)
        llm = LLM(self.model, ROOMY)
        self.outputs = [[llm.generate([prompt], wish)[0] for wish in WISHES] for prompt in PROMPTS]


@pytest.fixture(scope="module", params=long_but(("llama", "falcon_h1"), FAMILIES))
def begun(request: pytest.FixtureRequest) -> Begun:
    return Begun(request.param)


def continued(llm: LLM, prompt: Sequence[int], wish: SamplingParams, answered: Sequence[int]) -> tuple[Any, ...]:
    """Continue an answer; return its output, and its updates."""
    (request,) = llm.submit([prompt], wish, Intent(answered=tuple(answered)))
    news = NewTokens(request)
    updates: list[TokenUpdate] = []
    while llm.core.has_work:
        llm.step()
        updates += news.take()
    llm.core.space.check()
    return llm.output(request), updates


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_an_answer_is_continued_as_it_was_begun(begun: Begun, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(PROMPTS) - 1), "prompt")
    kind = data.draw(st.integers(0, len(WISHES) - 1), "parameters")
    config: EngineConfig = data.draw(st.sampled_from((ROOMY, CONFIG, replace(ROOMY, overlap=True))), "engine")
    whole: RequestOutput = begun.outputs[place][kind]
    num_answered = data.draw(st.integers(0, len(whole.token_ids) - 1), "answered")
    llm = LLM(begun.model, config)
    poison(llm)
    output, updates = continued(llm, PROMPTS[place], WISHES[kind], whole.token_ids[:num_answered])
    assert output.completions[0].token_ids == whole.token_ids
    assert output.completions[0].finish_reason == whole.completions[0].finish_reason
    assert output.completions[0].stop == whole.completions[0].stop
    assert [token for each in updates for token in each.token_ids] == list(whole.token_ids[num_answered:])
    assert output.prompt_token_ids == tuple(PROMPTS[place])
    scores, expected = output.completions[0].logprobs, whole.completions[0].logprobs
    if expected is not None:
        assert len(scores) == len(expected) - num_answered
        assert [each.token_id for each in scores] == [each.token_id for each in expected[num_answered:]]


def test_another_prefix_has_another_end(begun: Begun) -> None:
    """A negative control: the given tokens are what the answer continues."""
    whole = begun.outputs[0][0].token_ids
    other = [(token + 1) % 199 for token in whole[:6]]
    output, _ = continued(LLM(begun.model, ROOMY), PROMPTS[0], WISHES[0], other)
    assert list(output.token_ids[:6]) == other
    assert output.token_ids[6:] != whole[6:]


def test_a_continued_answer_hits_what_the_first_engine_cached(begun: Begun) -> None:
    llm = LLM(begun.model, ROOMY)
    whole = llm.generate([PROMPTS[3]], WISHES[0])[0]
    output, _ = continued(llm, PROMPTS[3], WISHES[0], whole.token_ids[:9])
    assert output.token_ids == whole.token_ids
    assert 0 < output.num_cached_tokens <= len(PROMPTS[3])


@pytest.mark.parametrize(
    ("answered", "params", "message"),
    [
        ((1, 2), SamplingParams(max_tokens=8, n=2), "only a single answer"),
        ((1, 2), SamplingParams(max_tokens=8, num_beams=2), "only a single answer"),
        ((1, 2), SamplingParams(max_tokens=2), "none is left"),
        ((1, 10**6), SamplingParams(max_tokens=8), "token ids must be"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    begun: Begun, answered: tuple[int, ...], params: SamplingParams, message: str
) -> None:
    llm = LLM(begun.model, ROOMY)
    with pytest.raises(RequestError, match=message):
        llm.submit([PROMPTS[0]], params, Intent(answered=answered))
    with pytest.raises(RequestError, match="answered must be token ids"):
        Intent(answered=("a",))  # type: ignore[arg-type]
    assert not llm.core.has_work
