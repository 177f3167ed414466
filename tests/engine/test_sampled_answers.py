"""Answers that are drawn: by a plain reference, alone or in company, after preemption; rows that fail or wait alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, EngineRequest, SamplingParams
from pagedkv.engine.sampling import NOT_READY
from pagedkv.engine.sampling.parameters import Pooling
from pagedkv.errors import RequestError, SamplingError
from pagedkv.probe import compat
from tests.choosing import long_but
from tests.engine.drawn_plainly import draw_plainly
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, compare, reference_of, serve

ROOMY = replace(CONFIG, num_blocks=200)
NUM_NEW = 16
GREEDY = SamplingParams(max_tokens=NUM_NEW)
KINDS = (
    SamplingParams(max_tokens=NUM_NEW, temperature=1.0, seed=1),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.7, top_k=20, repetition_penalty=1.3, seed=2),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.2, top_p=0.8, bad_words=[[5], [2, 9]], seed=3),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.9, min_p=0.05, logit_bias={8: 2.0, 9: -3.0}, seed=4),
    SamplingParams(max_tokens=NUM_NEW, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(max_tokens=NUM_NEW, repetition_penalty=1.5),
)
SHORT = {
    "room": ROOMY,
    "recompute": CONFIG,
    "swap": replace(CONFIG, preemption="swap", num_host_blocks=60),
}


def serve_each(
    llm: LLM, params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[EngineRequest]:
    """Serve prompts that arrive one after the other, each with its own parameters."""
    requests: list[EngineRequest] = []
    num_steps = 0
    while len(requests) < len(prompts) or llm.core.has_work:
        if len(requests) < len(prompts) and num_steps % 2 == 0:
            requests += llm.submit([prompts[len(requests)]], params[len(requests)])
        record = llm.step()
        assert record.failure is None, record.failure
        llm.core.space.check()
        num_steps += 1
    return requests


@pytest.mark.parametrize("memory", SHORT)
def test_each_row_is_drawn_as_processors_of_transformers_and_the_same_noise_draw_it(
    model: PreTrainedModel, memory: str
) -> None:
    requests = serve_each(LLM(model, SHORT[memory]), KINDS)
    num_certain = 0
    for prompt, params, request in zip(PROMPTS, KINDS, requests, strict=True):
        expected = draw_plainly(model, prompt, params, seed=params.seed or 0)
        found = request.samples[0].token_ids
        assert found[: expected.num_certain] == expected.token_ids[: expected.num_certain], params
        assert len(found) == NUM_NEW
        num_certain += expected.num_certain
    assert num_certain > 0.9 * NUM_NEW * len(KINDS)
    if memory != "room":
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("memory", SHORT)
def test_an_answer_is_the_same_alone_and_in_company(model: PreTrainedModel, memory: str) -> None:
    params = [replace(each, n=2 if each.temperature else 1, max_tokens=10) for each in KINDS]
    together = serve_each(LLM(model, SHORT[memory]), params)
    for prompt, each, request in zip(PROMPTS, params, together, strict=True):
        alone = LLM(model, ROOMY).generate([prompt], each)[0]
        assert [tuple(sample.token_ids) for sample in request.samples] == [one.token_ids for one in alone.completions]


def test_without_a_seed_the_engines_and_the_requests_number_tell(model: PreTrainedModel) -> None:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=2.0)

    def answers(seed: int) -> list[tuple[int, ...]]:
        outputs = LLM(model, replace(ROOMY, seed=seed)).generate([[3], [3]], params)
        return [output.token_ids for output in outputs]

    assert answers(0) == answers(0)
    assert len({*answers(0), *answers(1)}) == 4


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text: str) -> list[int]:
        """Number letters."""
        return [ord(letter) - 60 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Write numbers as letters."""
        return "".join(chr(60 + token) for token in token_ids)


@pytest.mark.parametrize("memory", SHORT)
def test_a_stop_text_ends_an_answer_and_is_cut_off(model: PreTrainedModel, memory: str) -> None:
    expected = [each.token_ids for each in reference_of("llama", PROMPTS, NUM_NEW)]
    texts = [Letters().decode(tokens) for tokens in expected]
    llm = LLM(model, SHORT[memory], tokenizer=Letters())
    params = [replace(GREEDY, stop=["never", text[6:9]]) for text in texts]
    requests = serve_each(llm, params)
    for text, tokens, wish, request in zip(texts, expected, params, requests, strict=True):
        begin = text.index(wish.stop[1])
        completion = request.output().completions[0]
        assert (completion.finish_reason, completion.stop) == ("stop", wish.stop[1])
        assert completion.text == text[:begin]
        assert list(completion.token_ids) == tokens[: begin + 3]


def test_bad_words_as_text_are_not_said(model: PreTrainedModel) -> None:
    text = Letters().decode(reference_of("llama", PROMPTS[:1], NUM_NEW)[0].token_ids)
    llm = LLM(model, ROOMY, tokenizer=Letters())
    answer = llm.generate(PROMPTS[:1], replace(GREEDY, bad_words=[text[4:6]]))[0].completions[0].text
    assert answer is not None
    assert text[4:6] not in answer
    assert answer[:5] == text[:5]


def test_the_text_ends_before_the_token_that_ended_it(model: PreTrainedModel) -> None:
    tokens = reference_of("llama", PROMPTS[:1], NUM_NEW)[0].token_ids
    llm = LLM(model, ROOMY, tokenizer=Letters())
    completion = llm.generate(PROMPTS[:1], replace(GREEDY, stop_token_ids=[tokens[5]]))[0].completions[0]
    end = tokens.index(tokens[5])
    assert (completion.text, completion.stop) == (Letters().decode(tokens[:end]), tokens[5])
    assert list(completion.token_ids) == tokens[: end + 1]


# Log-probabilities


def dense_logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)])).logits[0]
    return logits.float().log_softmax(dim=1)


def test_log_probabilities_are_of_the_logits_as_they_are(model: PreTrainedModel) -> None:
    wishes = [
        replace(GREEDY, logprobs=2, repetition_penalty=1.5),
        GREEDY,
        replace(GREEDY, logprobs=0, temperature=1.0, n=2, seed=1),
    ]
    outputs = LLM(model, ROOMY).generate(PROMPTS[:3], wishes)
    assert outputs[1].completions[0].logprobs is None
    for output in (outputs[0], outputs[2]):
        for completion in output.completions:
            assert completion.logprobs is not None
            expected = dense_logprobs(model, (*output.prompt_token_ids, *completion.token_ids))
            assert len(completion.logprobs) == NUM_NEW
            for number, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                row = expected[len(output.prompt_token_ids) + number - 1]
                assert found.token_id == token
                assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
                assert [value for _, value in found.top] == pytest.approx(row.topk(len(found.top)).values, abs=1e-4)


STATES = {"bamba"}
"""Families whose states are not kept where these prompts could be hit."""
FAMILIES = ("llama", "gemma2", "granite", "cohere2", "llama4_text", "deepseek_v3", "bamba")


@pytest.mark.parametrize("name", long_but(["gemma2", "granite", "cohere2", "bamba"], FAMILIES))
def test_those_of_a_prompt_are_right_over_chunks_preemption_and_declined_hits(name: str) -> None:
    model = make_model(name)
    llm = LLM(model, CONFIG)
    serve(llm, PROMPTS[:2], GREEDY)  # what could be hit
    requests = serve_each(llm, [replace(GREEDY, prompt_logprobs=2)] * 6)
    assert {request.num_cached_tokens for request in requests} == {0}
    for prompt, request in zip(PROMPTS, requests, strict=True):
        found = request.output().prompt_logprobs
        assert found is not None
        assert len(found) == len(prompt)
        assert found[0] is None
        expected = dense_logprobs(model, prompt)
        for place, (token, each) in enumerate(zip(prompt[1:], found[1:], strict=True)):
            assert each is not None
            assert each.token_id == token
            assert each.logprob == pytest.approx(float(expected[place, token]), abs=2e-3)
            assert len(each.top) == 2
    compare(requests, reference_of(name, PROMPTS, NUM_NEW))


def test_the_default_type_of_torch_changes_no_answer(model: PreTrainedModel) -> None:
    params = [GREEDY, replace(GREEDY, temperature=0.8, top_k=20, seed=4), replace(GREEDY, num_beams=2)]

    def answers() -> list[list[Sequence[int]]]:
        llm = LLM(model, ROOMY)
        return [[each.token_ids for each in llm.generate([PROMPTS[0]], one)[0].completions] for one in params]

    expected, usual = answers(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert answers() == expected
    finally:
        torch.set_default_dtype(usual)


def test_prompts_of_one_step_are_scored_each_by_its_own_tokens(model: PreTrainedModel) -> None:
    """The head is called for one after the other; no call takes from the next what the pass computed."""
    llm = LLM(model, ROOMY)
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    requests = llm.submit(PROMPTS[:3], params)
    while llm.core.has_work:
        record = llm.step()
        assert record.failure is None, record.failure
    for prompt, request in zip(PROMPTS[:3], requests, strict=True):
        expected = dense_logprobs(model, prompt)
        found = [each.logprob for each in request.output().prompt_logprobs or () if each is not None]
        own = [float(expected[place, token]) for place, token in enumerate(prompt[1:])]
        assert found == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", long_but(["gemma2", "granite", "cohere2", "bamba"], FAMILIES))
def test_hidden_states_are_pooled_over_chunks_preemption_and_hits(name: str, pooling: Pooling) -> None:
    model = make_model(name)
    llm = LLM(model, CONFIG)
    serve(llm, PROMPTS[:2], GREEDY)  # what could be hit
    requests = serve_each(llm, [replace(GREEDY, pooling=pooling)] * 6)
    has_hits = any(request.num_cached_tokens for request in requests)
    assert has_hits if pooling == "last" and name not in STATES else pooling == "last" or not has_hits
    for prompt, request in zip(PROMPTS, requests, strict=True):
        found = request.output().pooled
        assert found is not None
        with torch.inference_mode():
            hidden = compat.body(model)(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        assert found == pytest.approx(hidden.mean(dim=0) if pooling == "mean" else hidden[-1], abs=2e-3)
    compare(requests, reference_of(name, PROMPTS, NUM_NEW))


def test_log_probabilities_of_named_tokens_are_told_in_their_order(model: PreTrainedModel) -> None:
    named = [9, 3, 150]
    wishes = [replace(GREEDY, logprobs=0, logprob_token_ids=named), replace(GREEDY, logprobs=2)]
    outputs = LLM(model, ROOMY).generate(PROMPTS[:2], wishes)
    expected = dense_logprobs(model, (*outputs[0].prompt_token_ids, *outputs[0].token_ids))
    for number, each in enumerate(outputs[0].completions[0].logprobs or ()):
        row = expected[len(outputs[0].prompt_token_ids) + number - 1]
        assert [token for token, _ in each.top] == named
        assert [value for _, value in each.top] == pytest.approx([float(row[token]) for token in named], abs=1e-4)
    assert all(len(each.top) == 2 for each in outputs[1].completions[0].logprobs or ())
    with pytest.raises(RequestError, match="logprob_token_ids names tokens 3 to"):
        LLM(model, ROOMY).generate(PROMPTS[:1], replace(GREEDY, logprobs=0, logprob_token_ids=[3, 10**6]))
    with pytest.raises(RequestError, match="logprob_token_ids need logprobs"):
        SamplingParams(logprob_token_ids=[3])
    with pytest.raises(RequestError, match="pooling must be one of"):
        SamplingParams(pooling=cast("Pooling", "max"))


def test_a_prompt_never_has_its_whole_vocabulary_at_once(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda _, __, out: sizes.append(out.numel()))
    monkeypatch.setattr("pagedkv.engine.sampling.logprobs.prompt_logprobs.__kwdefaults__", {"elements": 199 * 4})
    try:
        output = LLM(model, ROOMY).generate([PROMPTS[3]], replace(GREEDY, max_tokens=1, prompt_logprobs=0))[0]
    finally:
        handle.remove()
    assert output.prompt_logprobs is not None
    assert max(sizes) <= 199 * 4


# Rows that fail, and rows that wait


class Slow:
    """A processor that is ready only at the n-th call for the same tokens."""

    def __init__(self, num_asked: int) -> None:
        self._num_asked = num_asked
        self._left = num_asked

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> Any:  # noqa: ANN401 - scores, or that they are not ready
        """Change nothing, late."""
        del ids
        self._left -= 1
        if self._left:
            return NOT_READY
        self._left = self._num_asked
        return scores


@pytest.mark.parametrize("memory", SHORT)
def test_a_row_that_waits_disturbs_nobody_and_says_the_same(model: PreTrainedModel, memory: str) -> None:
    params = [GREEDY, replace(GREEDY, logits_processors=[Slow(3)]), *[GREEDY] * 4]
    llm = LLM(model, SHORT[memory])
    requests = serve_each(llm, params)
    compare(requests, reference_of("llama", PROMPTS, NUM_NEW))
    assert llm.core.space.num_live_blocks() == 0
    if memory == "room":
        finished = [request.finished or 0.0 for request in requests]
        assert finished[1] == max(finished), "the one that waits ends last, the others do not wait for it"


def test_several_answers_go_on_when_the_last_has_its_token(model: PreTrainedModel) -> None:
    plain = replace(KINDS[0], n=3, max_tokens=6)
    expected = LLM(model, ROOMY).generate(PROMPTS[:1], plain)[0]
    slow = replace(plain, logits_processors=[Slow(2)])
    found = LLM(model, ROOMY).generate(PROMPTS[:1], slow)[0]
    assert [each.token_ids for each in found.completions] == [each.token_ids for each in expected.completions]


def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Raise at the fourth token of the answer."""
    if ids.shape[1] >= len(PROMPTS[1]) + 3:
        raise ValueError("my own mistake")
    return scores


def test_a_row_that_fails_ends_with_its_error_and_the_others_go_on(model: PreTrainedModel) -> None:
    params = [GREEDY, replace(GREEDY, logits_processors=[broken]), *[GREEDY] * 4]
    llm = LLM(model, ROOMY)
    outputs = llm.generate(PROMPTS, params)
    expected = reference_of("llama", PROMPTS, NUM_NEW)
    assert outputs[1].error == "ValueError: my own mistake"
    assert outputs[1].completions[0].finish_reason == "failed"
    assert list(outputs[1].token_ids) == expected[1].token_ids[:3]
    for place in (0, 2, 3, 4, 5):
        assert list(outputs[place].token_ids) == expected[place].token_ids
        assert outputs[place].error is None
    assert llm.core.space.num_live_blocks() == 0


def test_a_request_that_forbids_every_token_fails_alone(model: PreTrainedModel) -> None:
    nothing = replace(GREEDY, logit_bias=dict.fromkeys(range(199), -float("inf")))
    outputs = LLM(model, ROOMY).generate(PROMPTS[:2], [nothing, GREEDY])
    assert outputs[0].error is not None
    assert SamplingError.__name__ in outputs[0].error
    assert list(outputs[1].token_ids) == reference_of("llama", PROMPTS[1:2], NUM_NEW)[0].token_ids


def test_whoever_waits_can_be_aborted(model: PreTrainedModel) -> None:
    llm = LLM(model, EngineConfig(block_size=4, num_blocks=100, self_test=False))
    request = llm.submit(PROMPTS[:1], replace(GREEDY, logits_processors=[Slow(10**6)]))[0]
    for _ in range(4):
        llm.step()
    llm.core.abort(request)
    assert not llm.core.has_work
    assert llm.core.space.num_live_blocks() == 0
    assert request.output().completions[0].finish_reason == "aborted"
