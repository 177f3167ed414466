"""With guesses every answer is what it is without: drawn or not, with any parameters, wherever it ends."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, EngineRequest, PromptLookup, RequestOutput, SamplingParams
from pagedkv.space import Receipt
from tests.choosing import long_but
from tests.engine.families import make_model
from tests.engine.guesses import guess
from tests.engine.serving import CONFIG, PROMPTS, poison
from tests.engine.test_sampled_answers import KINDS, NUM_NEW, Letters

ROOMY = replace(CONFIG, num_blocks=200)
GREEDY = SamplingParams(max_tokens=NUM_NEW)
LOOKUP = PromptLookup(num_tokens=4)
SHORT = {
    "room": ROOMY,
    "recompute": replace(CONFIG, num_blocks=20),
    "swap": replace(CONFIG, num_blocks=20, preemption="swap", num_host_blocks=60),
}
WISHES = (
    *KINDS,
    replace(KINDS[1], logprobs=2, min_tokens=9, stop_token_ids=list(range(0, 199, 3))),
    SamplingParams(max_tokens=NUM_NEW, min_tokens=5, logprobs=1, stop_token_ids=list(range(0, 199, 4))),
    replace(KINDS[2], logprobs=0, prompt_logprobs=1),
)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[RequestOutput]:
    """Answer each wish alone, without guesses."""
    return [LLM(model, ROOMY).generate([prompt_of(place)], wish)[0] for place, wish in enumerate(WISHES)]


def prompt_of(place: int) -> list[int]:
    return list(PROMPTS[place % len(PROMPTS)])


def speculating(config: EngineConfig, lookup: PromptLookup = LOOKUP) -> EngineConfig:
    return replace(config, speculation=lookup)


def serve_guessed(
    llm: LLM, wishes: Sequence[SamplingParams], answers: Sequence[Sequence[int]], wrong_every: int
) -> list[EngineRequest]:
    """Serve prompts that arrive one after the other; what comes next is guessed from their answers."""
    requests: list[EngineRequest] = []
    num_steps = 0
    while len(requests) < len(wishes) or llm.core.has_work:
        if len(requests) < len(wishes) and num_steps % 2 == 0:
            requests += llm.submit([prompt_of(len(requests))], wishes[len(requests)])
            guess(requests[-1], answers[len(requests) - 1], wrong_every)
        record = llm.step()
        assert record.num_tokens <= llm.core.config.max_batched_tokens
        assert 0 <= record.num_accepted <= record.num_drafted
        llm.core.space.check()
        num_steps += 1
    assert llm.core.space.num_live_blocks() == 0
    return requests


def require_same(output: RequestOutput, expected: RequestOutput) -> None:
    for each, other in zip(output.completions, expected.completions, strict=True):
        assert each.token_ids == other.token_ids
        assert (each.finish_reason, each.stop, each.text) == (other.finish_reason, other.stop, other.text)
        assert (each.logprobs is None) == (other.logprobs is None)
        for one, same in zip(each.logprobs or (), other.logprobs or (), strict=True):
            assert (one.token_id, one.rank) == (same.token_id, same.rank)
            assert one.logprob == pytest.approx(same.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in same.top]


@pytest.mark.parametrize(
    ("memory", "wrong_every"), long_but([("room", 3), ("recompute", 3), ("swap", 0)], product(SHORT, [0, 3]))
)
def test_answers_are_the_same_with_guesses(
    model: PreTrainedModel, plain: list[RequestOutput], memory: str, wrong_every: int
) -> None:
    llm = LLM(model, speculating(SHORT[memory]))
    poison(llm)
    answers = [output.token_ids for output in plain]
    requests = serve_guessed(llm, WISHES, answers, wrong_every)
    for request, expected in zip(requests, plain, strict=True):
        require_same(llm.output(request), expected)
    num_drafted = sum(request.num_drafted for request in requests)
    num_accepted = sum(request.num_accepted for request in requests)
    assert 0 < num_accepted < num_drafted
    assert {output.completions[0].finish_reason for output in plain} == {"stop", "length"}
    assert memory == "room" or sum(request.num_preemptions for request in requests) > 0
    total = sum((request.output().receipt for request in requests), Receipt())
    assert total == llm.core.space.statistics().receipts


def test_guesses_that_are_wrong_or_wrongly_judged_would_be_noticed(
    model: PreTrainedModel, plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: an engine that accepts every guess."""
    answers = [output.token_ids for output in plain]
    llm = LLM(model, speculating(ROOMY))
    requests = llm.submit([prompt_of(4)], WISHES[4])
    guess(requests[0], answers[4], wrong_every=3)
    sample = llm.core._loop._answering._sampler.sample

    def believe(logits, places):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - as the sampler's
        sampled = sample(logits, places)
        for line, place in enumerate(places[1:]):
            if place.drafts:
                sampled.token_ids[line] = place.drafts[-1]
        return sampled

    monkeypatch.setattr(llm.core._loop._answering._sampler, "sample", believe)
    while llm.core.has_work:
        llm.step()
    assert requests[0].num_accepted > 0
    with pytest.raises(AssertionError):
        require_same(llm.output(requests[0]), plain[4])


@pytest.mark.parametrize("place", long_but((1, 2, 5, NUM_NEW - 1), range(1, NUM_NEW)))
def test_a_token_that_ends_an_answer_ends_it_among_accepted_drafts(model: PreTrainedModel, place: int) -> None:
    """Wherever it stands among the drafts: first, last, or the one behind them."""
    (answer,) = (output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY))
    wish = replace(GREEDY, stop_token_ids=[answer[place]])
    expected = LLM(model, ROOMY).generate(PROMPTS[:1], wish)[0]
    llm = LLM(model, speculating(ROOMY))
    (request,) = serve_guessed(llm, [wish], [answer], 0)
    require_same(llm.output(request), expected)
    assert len(llm.output(request).token_ids) == answer.index(answer[place]) + 1
    # What was computed after the end is not cached: the prefix cache ends where the answer does.
    cached = llm.core.space.match([*PROMPTS[0], *answer]).num_tokens
    assert cached <= len(PROMPTS[0]) + len(llm.output(request).token_ids) - 1


def test_a_stop_text_ends_an_answer_among_accepted_drafts(model: PreTrainedModel) -> None:
    (answer,) = (output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY))
    text = Letters().decode(list(answer))
    for begin in range(1, NUM_NEW - 4):
        wish = replace(GREEDY, stop=["never", text[begin : begin + 3]])
        expected = LLM(model, ROOMY, tokenizer=Letters()).generate(PROMPTS[:1], wish)[0]
        llm = LLM(model, speculating(ROOMY), tokenizer=Letters())
        (request,) = serve_guessed(llm, [wish], [answer], 0)
        require_same(llm.output(request), expected)


def test_of_a_request_alone_the_numbers_are_known(model: PreTrainedModel) -> None:
    (answer,) = (output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY))
    llm = LLM(model, speculating(ROOMY))
    (request,) = llm.submit(PROMPTS[:1], replace(GREEDY, max_tokens=12))
    guess(request, answer)
    records = []
    while llm.core.has_work:
        records.append(llm.step())
    # The first token of the prompt's last step; five and five; the last one alone, since no draft would be left of it.
    assert [record.num_drafted for record in records[-3:]] == [4, 4, 0]
    assert [record.num_accepted for record in records[-3:]] == [4, 4, 0]
    assert [record.num_decoded for record in records[-3:]] == [1, 1, 1]
    output = request.output()
    assert output.token_ids == answer[:12]
    assert (output.num_drafted_tokens, output.num_accepted_tokens) == (8, 8)
    assert output.num_computed_tokens == sum(record.num_tokens for record in records) == 26 + 3 + 8

    wrong = LLM(model, speculating(ROOMY, PromptLookup(num_tokens=2)))
    (request,) = wrong.submit(PROMPTS[:1], replace(GREEDY, max_tokens=4))
    guess(request, answer, wrong_every=1)
    while wrong.core.has_work:
        wrong.step()
    output = request.output()
    assert output.token_ids == answer[:4]
    assert (output.num_drafted_tokens, output.num_accepted_tokens) == (2 + 1, 0)
    assert output.num_computed_tokens == 26 + 3 + 3


def test_what_nobody_may_guess_is_not_guessed(model: PreTrainedModel) -> None:
    """Beams, several answers, and rows with foreign processors; beside a row that is guessed."""
    widths: list[int] = []

    def note(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        widths.append(token_ids.shape[1])
        return scores

    wishes = [
        replace(GREEDY, num_beams=2),
        replace(KINDS[0], n=2),
        replace(GREEDY, logits_processors=[note]),
        GREEDY,
    ]
    expected = LLM(model, ROOMY).generate(PROMPTS[:4], wishes)
    widths.clear()
    llm = LLM(model, speculating(ROOMY))
    requests = llm.submit(PROMPTS[:4], wishes)
    assert [request.scheduled.propose is None for request in requests] == [True, False, True, False]
    guess(requests[3], expected[3].token_ids)
    while llm.core.has_work:
        llm.step()
    for request, other in zip(requests, expected, strict=True):
        require_same(llm.output(request), other)
    assert [request.num_drafted for request in requests[:3]] == [0, 0, 0]
    assert requests[3].num_accepted > 0
    assert len(widths) == NUM_NEW


def test_the_last_of_several_answers_is_guessed_when_the_others_have_ended(model: PreTrainedModel) -> None:
    """Of requests that are one sequence from some step on."""
    both = LLM(model, ROOMY).generate(PROMPTS[:1], replace(KINDS[0], n=2))[0]
    longer, shorter = (each.token_ids for each in both.completions)
    end = next(place for place, token in enumerate(shorter) if token not in longer)
    wish = replace(KINDS[0], n=2, stop_token_ids=[shorter[end]])
    assert end < NUM_NEW - 4
    expected = LLM(model, ROOMY).generate(PROMPTS[:1], wish)[0]
    llm = LLM(model, speculating(ROOMY))
    (request,) = llm.submit(PROMPTS[:1], wish)
    guess(request, longer, wrong_every=4)
    while llm.core.has_work:
        llm.step()
    require_same(llm.output(request), expected)
    assert request.num_accepted > 0


def test_a_row_fails_where_it_would_without_guesses(model: PreTrainedModel) -> None:
    """Nothing is allowed behind a token: whoever guesses it wrongly does not fail, whoever comes to it does."""
    only = {token: -float("inf") for token in range(199) if token not in {7, 8}}
    wish = replace(GREEDY, max_tokens=6, logit_bias=only, bad_words=[[7, 7], [7, 8], [8, 8, 8, 8]])
    eights = replace(wish, logit_bias={**only, 7: -100.0})
    for each, guesses in ((wish, [7, 8, 7, 8, 7]), (wish, [8, 8, 7, 7, 7]), (eights, [8, 7, 7, 8, 8])):
        expected = LLM(model, ROOMY).generate(PROMPTS[:1], each)[0]
        llm = LLM(model, speculating(ROOMY))
        requests = llm.submit([PROMPTS[0], PROMPTS[1]], [each, GREEDY])
        guess(requests[0], guesses)
        while llm.core.has_work:
            llm.step()
            llm.core.space.check()
        require_same(llm.output(requests[0]), expected)
        assert requests[0].error == expected.error
        assert requests[0].num_drafted > 0
        assert requests[1].output().completions[0].finish_reason == "length"
        assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_a_fork_of_a_guessed_request_goes_on_from_what_was_accepted(name: str) -> None:
    model = make_model(name)
    (answer,) = (output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY))
    llm = LLM(model, speculating(ROOMY))
    poison(llm)
    (request,) = llm.submit(PROMPTS[:1], GREEDY)
    guess(request, answer, wrong_every=3)
    while request.num_accepted < 2:
        llm.step()
    forks = [request.fork(), request.fork(at=len(PROMPTS[0]) + 1)]
    guess(forks[0], answer[len(forks[0].prompt_token_ids) - len(PROMPTS[0]) :], wrong_every=2)
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    assert request.output().token_ids == answer
    for fork in forks:
        tokens_so_far = (*fork.output().prompt_token_ids, *fork.output().token_ids)
        assert tokens_so_far == (*PROMPTS[0], *answer)[: len(tokens_so_far)]
        assert len(tokens_so_far) == len(PROMPTS[0]) + NUM_NEW
    assert forks[0].num_accepted > 0


def test_several_tokens_of_a_step_are_streamed_together(model: PreTrainedModel) -> None:
    prompt = [7] * 20  # after it this model repeats some tokens
    llm = LLM(model, speculating(ROOMY))
    updates = [update.token_ids for update in llm.stream([prompt], replace(GREEDY, max_tokens=30))]
    expected = LLM(model, ROOMY).generate([prompt], replace(GREEDY, max_tokens=30))[0].token_ids
    assert tuple(token for each in updates for token in each) == expected
    assert max(map(len, updates)) > 1
