"""Forks of requests: at the end for nothing, earlier by what survives; each continues as the model would from there."""

from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, EngineRequest, SamplingParams
from pagedkv.errors import RequestError
from tests.choosing import long_but
from tests.engine.drawn_plainly import draw_plainly
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, poison, reference, reference_of

ROOMY = replace(CONFIG, num_blocks=200)
GREEDY = SamplingParams(max_tokens=20)
DRAWN = SamplingParams(max_tokens=20, temperature=1.0, seed=5)


def begin(llm: LLM, num_tokens: int, params: SamplingParams = GREEDY, prompt: int = 0) -> EngineRequest:
    """Serve a request until it has so many tokens."""
    request = llm.submit(PROMPTS[prompt : prompt + 1], params)[0]
    while len(request.samples[0].token_ids) < num_tokens:
        llm.step()
    return request


def finish(llm: LLM) -> None:
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    assert llm.core.space.num_live_blocks() == 0


PLACES = (None, 29, 24, 9, 1)
FORKED = [
    (name, at)
    for name in ("llama", "mistral", "gemma2", "deepseek_v3", "bamba", "falcon_h1", "qwen3_next")
    for at in PLACES
]
EACH_TIME = {
    *(("llama", at) for at in PLACES),
    ("mistral", 29),
    ("gemma2", 9),
    ("deepseek_v3", 24),
    ("bamba", 29),
    ("bamba", 24),
}
"""What a fork shares differs by place, what must be there by the family's kind of layers."""


@pytest.mark.parametrize(("name", "at"), long_but(EACH_TIME, FORKED))
def test_a_fork_goes_on_as_the_model_does_from_there(name: str, at: int | None) -> None:
    model = make_model(name)
    llm = LLM(model, ROOMY)
    poison(llm)
    request = begin(llm, 9)
    tokens = request.tokens_of(request.samples[0]).tolist()
    child = request.fork(at=at, params=GREEDY)
    assert child.prompt_token_ids.tolist() == tokens[:at]
    finish(llm)
    expected = [*reference_of(name, PROMPTS[:1]), *reference(model, [tokens[:at]])]
    for each, theirs in zip((request, child), expected, strict=True):
        assert each.samples[0].token_ids[: theirs.num_certain] == theirs.token_ids[: theirs.num_certain]
    assert child.output().num_computed_tokens == (child.num_missing_tokens or 0) + 19


@pytest.mark.parametrize("name", ["llama", "mistral", "bamba"])
def test_at_the_end_a_fork_costs_nothing(name: str) -> None:
    llm = LLM(make_model(name), ROOMY)
    request = begin(llm, 9)
    before = llm.core.space.num_live_blocks()
    child = request.fork(n=3, params=replace(DRAWN, n=3))
    assert llm.core.space.num_live_blocks() == before
    assert child.num_missing_tokens == 1, "the token that was sampled and is not computed yet"
    assert child.output().queue_seconds == 0
    finish(llm)
    assert child.output().num_computed_tokens == 1 + 3 * 19


def test_answers_of_a_fork_are_drawn_with_noise_of_their_own(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    request = begin(llm, 9, DRAWN)
    child = request.fork(n=4)
    finish(llm)
    parts = {tuple(sample.token_ids) for sample in child.samples}
    assert len({*parts, tuple(request.samples[0].token_ids[9:])}) == 5
    assert {len(part) for part in parts} == {11}, "what was left"
    for sample in child.samples:
        expected = draw_plainly(
            model, child.prompt_token_ids.tolist(), child.params, seed=child.spec.seed, sample=sample.index
        )
        assert sample.token_ids[: expected.num_certain] == expected.token_ids[: expected.num_certain]


def test_each_answer_of_a_request_can_be_forked(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    request = begin(llm, 5, replace(DRAWN, n=2))
    children = [request.fork(params=GREEDY, sample=index) for index in (0, 1)]
    finish(llm)
    for child, sample in zip(children, request.samples, strict=True):
        prefix = [*PROMPTS[0], *sample.token_ids[:5]]
        assert child.prompt_token_ids.tolist() == prefix
        assert child.samples[0].token_ids == reference(model, [prefix])[0].token_ids


def test_what_waits_prefills_or_has_ended_can_be_forked(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    waiting = llm.submit(PROMPTS[:1], GREEDY)[0]
    early = waiting.fork(params=GREEDY)
    llm.step()
    assert not waiting.samples[0].token_ids, "16 of its 26 tokens are computed"
    middle = waiting.fork(params=GREEDY)
    assert middle.num_missing_tokens == 10
    finish(llm)
    late = waiting.fork(at=30, params=GREEDY)
    finish(llm)
    expected = reference_of("llama", PROMPTS[:1])[0].token_ids
    assert [each.samples[0].token_ids for each in (waiting, early, middle)] == [expected] * 3
    assert late.num_missing_tokens == 2, "7 blocks of 4 tokens survive"
    assert late.samples[0].token_ids[:16] == expected[4:]


@pytest.mark.parametrize("params", [None, GREEDY, DRAWN, replace(DRAWN, n=4)])
def test_a_fork_has_as_many_answers_as_it_is_asked_for(model: PreTrainedModel, params: SamplingParams | None) -> None:
    llm = LLM(model, ROOMY)
    request = begin(llm, 5)
    child = request.fork(n=4, params=params)
    finish(llm)
    answers = [tuple(sample.token_ids) for sample in child.samples]
    assert len(answers) == 4
    if params is None or params.temperature == 0:
        expected = reference(model, [child.prompt_token_ids.tolist()])[0].token_ids
        assert answers == [tuple(expected[: len(answers[0])])] * 4, "the most likely tokens, four times"
    else:
        assert len(set(answers)) == 4


def test_params_alone_say_how_many_answers_a_fork_has(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    request = begin(llm, 5, replace(DRAWN, n=3))
    assert len(request.fork(params=replace(DRAWN, n=2)).samples) == 2
    assert len(request.fork().samples) == 1
    finish(llm)


def test_greedy_answers_of_one_prompt_are_all_the_same(model: PreTrainedModel) -> None:
    outputs = LLM(model, ROOMY).generate(PROMPTS[:2], replace(GREEDY, n=3))
    for output, expected in zip(outputs, reference_of("llama", PROMPTS[:2]), strict=True):
        assert [each.token_ids for each in output.completions] == [tuple(expected.token_ids)] * 3


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, preemption="swap", num_host_blocks=60)])
def test_forks_are_preempted_like_others(model: PreTrainedModel, config: EngineConfig) -> None:
    llm = LLM(model, replace(config, num_blocks=24))
    requests = [begin(llm, 3), begin(llm, 2, prompt=3)]
    children = [request.fork(params=GREEDY) for request in requests]
    finish(llm)
    assert sum(each.num_preemptions for each in (*requests, *children)) > 0
    for child in children:
        expected = reference(model, [child.prompt_token_ids.tolist()])[0]
        assert child.samples[0].token_ids == expected.token_ids


def test_forks_that_cannot_be_are_refused(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    request = begin(llm, 3)
    with pytest.raises(RequestError, match="n must be at least 1, got 0"):
        request.fork(n=0)
    with pytest.raises(RequestError, match=r"fork\(n=4\) contradicts its params, which ask for n=2"):
        request.fork(n=4, params=replace(DRAWN, n=2))
    with pytest.raises(RequestError, match="at must be at most 29"):
        request.fork(at=30)
    with pytest.raises(RequestError, match="sample must be at most 0"):
        request.fork(sample=1)
    with pytest.raises(RequestError, match="does not fit"):
        request.fork(params=replace(DRAWN, n=6))
    finish(llm)
    with pytest.raises(RequestError, match="has all of its 20 tokens"):
        request.fork()
