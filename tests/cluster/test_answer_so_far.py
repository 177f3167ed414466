"""An answer whose replicas fail is the answer of one that does not, or the request ends with an error."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.cluster.replicated_engine import AnswerSoFar
from pagedkv.engine import LLM, Intent, RequestOutput, SamplingParams, TokenUpdate
from pagedkv.engine.answer_stream import NewTokens
from pagedkv.errors import EngineError
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS

ROOMY: Final = replace(CONFIG, num_blocks=200)
WISHES: Final = (
    SamplingParams(max_tokens=10),
    SamplingParams(max_tokens=10, temperature=1.0, seed=3, logprobs=1, frequency_penalty=0.4),
    SamplingParams(max_tokens=8, temperature=1.0, seed=4, n=3, logprobs=0),
    SamplingParams(max_tokens=10, temperature=1.0, seed=6, stop_token_ids=list(range(0, 199, 6))),
)


class Engines:
    """A model and an engine of it, with the answers of requests that nothing disturbs."""

    def __init__(self) -> None:
        self.model = make_model("llama")
        self.llm = LLM(self.model, ROOMY)
        self.whole = [[self.llm.generate([prompt], wish)[0] for wish in WISHES] for prompt in PROMPTS[:3]]


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines()


def serve(
    llm: LLM, prompt: Sequence[int], params: SamplingParams, losses: Sequence[int], *, batch: int = 1
) -> tuple[RequestOutput, list[TokenUpdate], AnswerSoFar]:
    """Serve a request by one engine after another; each but the last is lost after some messages of ``batch`` steps."""
    so_far, intent = AnswerSoFar(prompt, params), Intent()
    got: list[TokenUpdate] = []
    for num_messages in (*losses, None):
        (request,) = llm.submit([prompt], params, intent)
        news, num_told = NewTokens(request), 0
        while not request.is_finished and num_told != num_messages:
            for _ in range(batch):
                llm.step()
            so_far.note_cached(request.num_cached_tokens)
            got += so_far.take(tuple(news.take()))
            num_told += 1
        if num_messages is None:
            return so_far.complete(llm.output(request)), got, so_far
        llm.core.abort(request)
        intent = so_far.begin_again(intent)
    raise AssertionError


@settings(max_examples=25, deadline=None)
@given(
    place=st.integers(0, 2),
    kind=st.integers(0, len(WISHES) - 1),
    losses=st.lists(st.integers(0, 7), max_size=3),
    batch=st.integers(1, 3),
)
def test_a_client_gets_the_answer_of_one_replica(
    engines: Engines, place: int, kind: int, losses: list[int], batch: int
) -> None:
    whole, params = engines.whole[place][kind], WISHES[kind]
    num_steps = min(len(each.token_ids) for each in whole.completions)
    losses = [each for each in losses if each * batch < num_steps]  # else nothing is left to continue
    while sum(losses) * batch >= num_steps:
        losses.pop()
    output, got, so_far = serve(engines.llm, PROMPTS[place], params, losses, batch=batch)
    assert so_far.num_attempts == len(losses) + 1
    for mine, theirs in zip(output.completions, whole.completions, strict=True):
        assert (mine.token_ids, mine.finish_reason, mine.stop) == (theirs.token_ids, theirs.finish_reason, theirs.stop)
        streamed = [token for each in got if each.index == mine.index for token in each.token_ids]
        assert streamed == list(theirs.token_ids), "the stream is the answer, each token once"
        reasons = [each.finish_reason for each in got if each.index == mine.index and each.finish_reason]
        assert reasons == [theirs.finish_reason]
        if params.logprobs is not None:
            assert [each.token_id for each in mine.logprobs or ()] == list(theirs.token_ids)
            scores = [one for each in got if each.index == mine.index for one in each.logprobs or ()]
            assert [each.token_id for each in scores] == list(theirs.token_ids)


def test_several_answers_that_begin_otherwise_are_not_mixed() -> None:
    so_far = AnswerSoFar([1, 2], SamplingParams(n=2))
    assert so_far.take([TokenUpdate(0, 0, (5, 6), None)])[0].token_ids == (5, 6)
    so_far.begin_again(Intent())
    assert so_far.take([TokenUpdate(0, 0, (5,), None)]) == ()
    with pytest.raises(EngineError, match="cannot be continued"):
        so_far.take([TokenUpdate(0, 0, (7,), None)])


def test_an_answer_that_ended_without_an_output_has_what_was_sent() -> None:
    so_far = AnswerSoFar([1, 2], SamplingParams(n=2))
    so_far.take([TokenUpdate(0, 0, (5, 6), "stop", None, 6), TokenUpdate(0, 1, (9,), None)])
    (last,) = so_far.last_updates("aborted")
    assert (last.index, last.token_ids, last.finish_reason) == (1, (), "aborted")
    output = so_far.ended("aborted")
    assert [(each.token_ids, each.finish_reason) for each in output.completions] == [
        ((5, 6), "stop"),
        ((9,), "aborted"),
    ]
    assert output.prompt_token_ids == (1, 2)


def test_hits_are_those_of_the_first_life(engines: Engines) -> None:
    """A later life also hits the tokens that were sent, which are no part of the prompt's."""
    engines.llm.reset_prefix_cache()
    output, _, so_far = serve(engines.llm, PROMPTS[0], WISHES[0], [6])
    assert so_far.num_attempts == 2
    assert output.num_cached_tokens == 0
    assert output.explanation is None, "that of the second life is of another prompt"


def test_loads_are_those_of_the_life_whose_hits_are_counted(engines: Engines) -> None:
    """Else hits by medium would not add up: a later life loads what the first one has stored."""
    output = replace(engines.llm.generate([PROMPTS[0]], WISHES[0])[0], num_loaded_tokens={"folder": 4})
    so_far = AnswerSoFar(PROMPTS[0], WISHES[0])
    so_far.note_cached(output.num_cached_tokens)
    assert so_far.complete(output) == output
    so_far.begin_again(Intent())
    moved = so_far.complete(output)
    assert (moved.num_cached_tokens, moved.num_loaded_tokens) == (output.num_cached_tokens, {})
    unknown = AnswerSoFar(PROMPTS[0], WISHES[0])
    unknown.begin_again(Intent())
    assert unknown.complete(output) == output
