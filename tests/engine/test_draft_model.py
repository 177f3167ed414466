"""A draft model changes no token of any answer; and where it equals its target, all that it proposes is accepted.

The second half shows that its cache is right: one wrong key, and a model that drafts for itself proposes other tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from pagedkv.engine import (
    LLM,
    EngineConfig,
    Intent,
    RequestOutput,
    SamplingParams,
)
from pagedkv.engine.drafter import Drafter, DraftPass, OpenDrafts
from pagedkv.engine.sampling import Place
from pagedkv.space import Receipt
from tests.choosing import long_but
from tests.engine.drafts import ROOMY, accepted_at_most, counting_tokens, counts_of, near, run, serve_drafted
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, NUM_NEW, PROMPTS, poison
from tests.engine.test_sampled_answers import KINDS, Letters
from tests.engine.test_speculation import GREEDY, WISHES, prompt_of, require_same

MEMORIES: Final = {
    "room": ROOMY,
    "recompute": replace(CONFIG, num_blocks=22),
    "swap": replace(CONFIG, num_blocks=22, preemption="swap", num_host_blocks=60),
}
FAMILIES: Final = ("llama", "gemma3_text", "mistral", "deepseek_v3", "mixtral", "gemma3n_text", "llama4_text", "bamba")
DRAFTS: Final = ("llama", "gemma3_text", "deepseek_v3", "gemma3n_text", "mistral", "gpt2", "mixtral", "llama4_text")


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[RequestOutput]:
    """Answer each wish alone, without drafts."""
    return answers_of(model, WISHES)


def answers_of(model: PreTrainedModel, wishes: Sequence[SamplingParams]) -> list[RequestOutput]:
    return [LLM(model, ROOMY).generate([prompt_of(place)], wish)[0] for place, wish in enumerate(wishes)]


# The same answers


@pytest.mark.parametrize(
    ("kind", "memory"),
    long_but(
        [*product(["near"], MEMORIES), ("equal", "room"), ("random", "swap")],
        product(["equal", "near", "random"], MEMORIES),
    ),
)
def test_answers_are_those_without_drafts(
    model: PreTrainedModel, plain: list[RequestOutput], kind: str, memory: str
) -> None:
    drafts = {"equal": model, "near": near(model), "random": make_model("llama", num_hidden_layers=1)}
    llm = LLM(model, MEMORIES[memory], draft_model=drafts[kind])
    requests = serve_drafted(llm, WISHES)
    for request, expected in zip(requests, plain, strict=True):
        require_same(llm.output(request), expected)
    num_drafted, num_accepted = counts_of(requests)
    if kind == "equal":
        assert num_accepted == sum(accepted_at_most(request) for request in requests) > 0
    else:
        assert {"near": 0.25, "random": 0.0}[kind] <= num_accepted / num_drafted < {"near": 1.0, "random": 0.2}[kind]
    assert memory == "room" or sum(request.num_preemptions for request in requests) > 0
    total = sum((request.output().receipt for request in requests), Receipt())
    assert total == llm.core.space.statistics().receipts


@pytest.mark.parametrize("name", long_but(("deepseek_v3", "bamba"), FAMILIES[1:]))
def test_other_families_are_drafted_for(name: str) -> None:
    """By a small Llama, which hardly ever guesses right, and by themselves where they are of attention alone."""
    model = make_model(name)
    wishes = (GREEDY, KINDS[0], KINDS[1], GREEDY)
    expected = answers_of(model, wishes)
    for draft in (make_model("llama", num_hidden_layers=1), *([] if name == "bamba" else [model])):
        llm = LLM(model, replace(CONFIG, num_blocks=26), draft_model=draft)
        requests = serve_drafted(llm, wishes)
        for request, output in zip(requests, expected, strict=True):
            require_same(llm.output(request), output)
        num_drafted, num_accepted = counts_of(requests)
        assert num_drafted > 0
        assert (num_accepted == num_drafted) == (draft is model)


@pytest.mark.parametrize("name", long_but(("gemma3_text",), DRAFTS[1:]))
def test_other_families_draft(model: PreTrainedModel, name: str) -> None:
    draft = make_model(name)
    wishes = (GREEDY, KINDS[0], KINDS[2], GREEDY)
    llm = LLM(model, ROOMY, draft_model=draft)
    requests = serve_drafted(llm, wishes)
    for request, output in zip(requests, answers_of(model, wishes), strict=True):
        require_same(llm.output(request), output)
    assert counts_of(requests)[0] > 0


@pytest.mark.long
def test_a_draft_model_that_gives_no_numbers_changes_no_answer(
    model: PreTrainedModel, plain: list[RequestOutput]
) -> None:
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weights in draft.get_input_embeddings().parameters():
            weights.fill_(torch.nan)
    llm = LLM(model, replace(ROOMY, self_test=False), draft_model=draft)
    for request, expected in zip(serve_drafted(llm, WISHES), plain, strict=True):
        require_same(llm.output(request), expected)


def test_a_stop_text_ends_an_answer_among_accepted_drafts(model: PreTrainedModel) -> None:
    text = Letters().decode(list(LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY)[0].token_ids))
    llm = LLM(model, ROOMY, draft_model=model, tokenizer=Letters())
    for begin in range(1, GREEDY.max_tokens - 4 if GREEDY.max_tokens else 0, 3):
        wish = replace(GREEDY, stop=["never", text[begin : begin + 3]])
        expected = LLM(model, ROOMY, tokenizer=Letters()).generate(PROMPTS[:1], wish)[0]
        require_same(llm.generate(PROMPTS[:1], wish)[0], expected)


MODELS: Final = {
    "equal": make_model("llama"),
    "near": near(make_model("llama")),
    "window": make_model("gemma3_text", num_hidden_layers=3),
}
PLAIN: Final = LLM(MODELS["equal"], replace(ROOMY, warm_up=False))
COMMON: Final = {
    "max_tokens": st.integers(3, 14),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
    "min_tokens": st.integers(0, 3),
    "logprobs": st.sampled_from([None, None, 1]),
    "stop_token_ids": st.lists(st.integers(0, 198), max_size=40),
}
DRAWN: Final = {
    "temperature": st.sampled_from([0.6, 1.1]),
    "top_k": st.sampled_from([0, 0, 5]),
    "top_p": st.sampled_from([1.0, 0.9]),
    "seed": st.integers(0, 5),
}
PARAMS: Final = st.one_of(st.builds(SamplingParams, **COMMON), st.builds(SamplingParams, **COMMON, **DRAWN))
REQUESTS: Final = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), PARAMS), min_size=1, max_size=6)


CONFIGS: Final = st.builds(
    lambda memory, num_draft_tokens, budget: replace(
        MEMORIES[memory], num_draft_tokens=num_draft_tokens, max_batched_tokens=budget, warm_up=False
    ),
    st.sampled_from(sorted(MEMORIES)),
    st.integers(1, 6),
    st.sampled_from([8, 16, 40]),
)


@settings(max_examples=15, deadline=None)
@given(requests=REQUESTS, config=CONFIGS, kind=st.sampled_from(sorted(MODELS)), aborted=st.integers(0, 12))
def test_random_mixes_are_answered_as_without_drafts(
    requests: list[tuple[int, int, SamplingParams]], config: EngineConfig, kind: str, aborted: int
) -> None:
    llm = LLM(MODELS["equal"], config, draft_model=MODELS[kind])
    poison(llm)
    prompts = [[*PROMPTS[place], *range(40, 40 + extra)] for place, extra, _ in requests]
    served = llm.submit(prompts, [wish for *_, wish in requests])
    given_up = served[-1] if len(served) > 1 else None
    num_steps = 0
    while llm.core.has_work:
        assert llm.step().failure is None
        llm.core.space.check()
        num_steps += 1
        if num_steps == aborted and given_up is not None:
            llm.core.abort(given_up)
    expected = PLAIN.generate(prompts, [wish for *_, wish in requests])
    for request, output in zip(served, expected, strict=True):
        if request is not given_up:
            require_same(llm.output(request), output)
        if kind == "equal" and request.output().completions[0].finish_reason == "length":
            assert request.num_accepted == request.num_drafted
    assert llm.core.space.num_live_blocks() == 0


# All drafts of an equal model are accepted


def test_of_a_request_alone_the_numbers_are_known(model: PreTrainedModel) -> None:
    (answer,) = (output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY))
    draft = copy.deepcopy(model)
    llm = LLM(model, ROOMY, draft_model=draft)
    assert llm.core.config.num_draft_tokens == 4
    (request,) = llm.submit(PROMPTS[:1], replace(GREEDY, max_tokens=12))
    with counting_tokens(draft) as computed:
        records = []
        while llm.core.has_work:
            records.append(llm.step())
    assert [record.num_decoded for record in records] == [0, 1, 1, 1]
    assert [record.num_drafted for record in records] == [0, 4, 4, 0]
    assert [record.num_accepted for record in records] == [0, 4, 4, 0]
    assert computed == [len(PROMPTS[0]), *[1] * 5, *[1] * 5, 1]  # the prompt; a token and four drafts, twice; a token
    output = request.output()
    assert output.token_ids == answer[:12]
    assert (output.num_drafted_tokens, output.num_accepted_tokens) == (8, 8)
    assert output.num_computed_tokens == len(PROMPTS[0]) + 3 + 8


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 7])
def test_fewer_steps_serve_the_same_answers(model: PreTrainedModel, num_draft_tokens: int) -> None:
    steps = []
    for draft in (None, model):
        llm = LLM(model, replace(ROOMY, num_draft_tokens=num_draft_tokens if draft else 0), draft_model=draft)
        llm.submit(PROMPTS[:1], replace(GREEDY, max_tokens=17))
        steps.append(0)
        while llm.core.has_work:
            llm.step()
            steps[-1] += 1
    assert steps == [17, 1 + -(-16 // (1 + num_draft_tokens))]


def test_a_prefix_is_hit_in_both_caches(model: PreTrainedModel) -> None:
    draft = copy.deepcopy(model)
    llm = LLM(model, ROOMY, draft_model=draft)
    poison(llm)
    (first,) = llm.generate(PROMPTS[3:4], GREEDY)
    longer = [*PROMPTS[3], *first.token_ids, 9]
    with counting_tokens(draft) as computed:
        (second,) = llm.generate([longer], GREEDY)
    assert second.num_cached_tokens == len(longer) // 4 * 4 - (0 if len(longer) % 4 else 4)
    assert computed[0] == len(longer) - second.num_cached_tokens
    require_same(second, LLM(model, ROOMY).generate([longer], GREEDY)[0])
    assert second.num_accepted_tokens == second.num_drafted_tokens > 0


def test_prompts_in_chunks_are_drafted_for(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, max_batched_tokens=8), draft_model=copy.deepcopy(model))
    requests = serve_drafted(llm, [GREEDY] * 4)
    num_drafted, num_accepted = counts_of(requests)
    assert num_accepted == num_drafted > 0


@pytest.mark.parametrize("name", long_but(("gemma3_text",), ("llama", "gemma3_text", "deepseek_v3")))
def test_forks_go_on_in_both_caches(name: str) -> None:
    model = make_model(name)
    (answer,) = (output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY))
    llm = LLM(model, ROOMY, draft_model=model)
    poison(llm)
    (request,) = llm.submit(PROMPTS[:1], GREEDY)
    while request.num_accepted < 5:
        llm.step()
    forks = [request.fork(), request.fork(at=len(PROMPTS[0]) + 1), request.fork(n=2, params=replace(GREEDY, n=2))]
    run(llm)
    assert request.output().token_ids == answer
    for fork in forks:
        tokens_so_far = (*fork.output().prompt_token_ids, *fork.output().completions[-1].token_ids)
        assert tokens_so_far == (*PROMPTS[0], *answer)[: len(tokens_so_far)] or fork.params.n > 1
    for each in (request, *forks[:2]):
        assert each.num_accepted == each.num_drafted > 0


def test_rows_without_drafts_keep_the_draft_models_cache_whole(model: PreTrainedModel) -> None:
    """Several answers, beams and foreign processors are not drafted for; the last answer of several is."""

    def nothing(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del token_ids
        return scores

    both = LLM(model, ROOMY).generate(PROMPTS[:1], replace(KINDS[0], n=2))[0]
    longer, shorter = (each.token_ids for each in both.completions)
    end = next(token for token in shorter if token not in longer)
    wishes = [
        replace(KINDS[0], n=2, stop_token_ids=[end]),
        replace(GREEDY, num_beams=2),
        replace(GREEDY, logits_processors=[nothing]),
        GREEDY,
    ]
    expected = LLM(model, ROOMY).generate(PROMPTS[:4], wishes)
    llm = LLM(model, ROOMY, draft_model=model)
    poison(llm)
    requests = llm.submit(PROMPTS[:4], wishes)
    run(llm)
    for request, output in zip(requests, expected, strict=True):
        require_same(llm.output(request), output)
    assert [request.num_drafted for request in requests[1:3]] == [0, 0]
    for request in (requests[0], requests[3]):
        assert request.num_accepted == request.num_drafted > 0


def test_a_prediction_is_guessed_from_and_the_others_are_drafted(model: PreTrainedModel) -> None:
    config = replace(ROOMY, predicted_tokens=3)
    expected = LLM(model, ROOMY).generate(PROMPTS[:2], GREEDY)
    llm = LLM(model, config, draft_model=model)
    poison(llm)
    prediction = (*expected[0].token_ids[:6], 5, *expected[0].token_ids[7:])
    requests = llm.submit(PROMPTS[:2], GREEDY, [Intent(prediction=prediction), Intent()])
    run(llm)
    for request, output in zip(requests, expected, strict=True):
        require_same(llm.output(request), output)
    assert 0 < requests[0].num_accepted < requests[0].num_drafted
    assert requests[1].num_accepted == requests[1].num_drafted > 0
    # What was predicted went through the draft model too: a request that hits it is drafted for rightly.
    (again,) = llm.generate([[*PROMPTS[0], *expected[0].token_ids]], GREEDY)
    assert again.num_cached_tokens >= len(PROMPTS[0]) + 12
    assert again.num_accepted_tokens == again.num_drafted_tokens > 0


# Negative controls


def acceptance_of(model: PreTrainedModel, wishes: Sequence[SamplingParams]) -> float:
    """Serve wishes with a model that drafts for itself, and require the right answers; return its share of hits."""
    llm = LLM(model, ROOMY, draft_model=model)
    requests = serve_drafted(llm, wishes)
    for request, expected in zip(requests, answers_of(model, wishes), strict=True):
        require_same(llm.output(request), expected)
    num_drafted, num_accepted = counts_of(requests)
    return num_accepted / num_drafted


BROKEN: Final = {
    "positions": lambda each: replace(each, positions=each.positions + 1),
    "slots": lambda each: replace(each, tokens=each.tokens - 1),
    "ranges": lambda each: replace(each, starts=each.starts - 1, ends=each.ends - 1),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_second_pass_would_be_noticed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    assert acceptance_of(model, [GREEDY] * 4) == 1.0
    passes = OpenDrafts.passes

    def broken(self: OpenDrafts, *given: Any) -> list[DraftPass]:  # noqa: ANN401 - as they are
        return [BROKEN[what](each) if number else each for number, each in enumerate(passes(self, *given))]

    monkeypatch.setattr(OpenDrafts, "passes", broken)
    assert acceptance_of(model, [GREEDY] * 4) < 0.9


def test_a_gap_behind_the_last_draft_would_be_noticed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pass, behind which nothing is proposed, writes the keys of the last draft."""
    passes = OpenDrafts.passes

    def without_the_last(self: OpenDrafts, *given: Any) -> list[DraftPass]:  # noqa: ANN401 - as they are
        listed = list(passes(self, *given))
        return listed[:-1] if len(listed) > 1 else listed

    monkeypatch.setattr(OpenDrafts, "passes", without_the_last)
    assert acceptance_of(model, [GREEDY] * 4) < 0.9


@pytest.mark.long
def test_drafts_without_the_rows_noise_would_be_noticed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = [replace(KINDS[0], max_tokens=NUM_NEW)] * 4
    assert acceptance_of(model, wishes) == 1.0
    drawn = Drafter._drawn

    def of_other_rows(self: Drafter, logits: torch.Tensor, places: Sequence[Place], *rest: Any) -> torch.Tensor:  # noqa: ANN401 - as they are
        others = [Place(place.sequence.fork(place.sequence.sample + 1)) for place in places]
        return drawn(self, logits, others, *rest)

    monkeypatch.setattr(Drafter, "_drawn", of_other_rows)
    assert acceptance_of(model, wishes) < 0.7


def test_a_device_that_draws_alone_draws_the_same_drafts(model: PreTrainedModel) -> None:
    """As on a GPU, by its kernels' plain forms."""
    llm = LLM(model, ROOMY, draft_model=model)
    for sampler in (llm.core._loop._answering._sampler, llm.core._parts.drafter._sampler):  # type: ignore[union-attr]
        sampler._draws_ahead = True  # type: ignore[union-attr]
    requests = serve_drafted(llm, WISHES[:6])
    for request, expected in zip(requests, answers_of(model, WISHES[:6]), strict=True):
        require_same(llm.output(request), expected)
        assert request.num_accepted == accepted_at_most(request)


@pytest.mark.parametrize("name", ["bamba", *long_but((), ("qwen3_next", "lfm2"))])
@pytest.mark.parametrize("wrong_every", [0, 3])
def test_drafts_for_recurrent_layers_are_accepted_and_hit(name: str, wrong_every: int) -> None:
    """Drafts by hand, in place of the draft model's: some states of the step become current, others go back."""
    model = make_model(name)
    (answer,) = (output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[3:4], GREEDY))
    guesses = [
        (token + 1) % 199 if wrong_every and not place % wrong_every else token for place, token in enumerate(answer)
    ]
    llm = LLM(model, ROOMY, draft_model=make_model("llama", num_hidden_layers=1))
    poison(llm)

    def by_hand(_: torch.Tensor, places: Sequence[Place], before: Sequence[Sequence[int]]) -> torch.Tensor:
        done = [place.sequence.num_generated + len(each) for place, each in zip(places, before, strict=True)]
        return torch.tensor([guesses[place] for place in done])

    llm.core._parts.drafter._drawn = by_hand  # type: ignore[union-attr,method-assign]
    (request,) = llm.submit(PROMPTS[3:4], GREEDY)
    run(llm)
    assert request.output().token_ids == answer
    assert (request.num_accepted == request.num_drafted) == (not wrong_every)
    assert request.num_accepted > 4
    (again,) = llm.submit([[*PROMPTS[3], *answer[:-2]]], replace(GREEDY, max_tokens=2))
    run(llm)
    assert again.output().token_ids == answer[-2:]
    assert again.num_cached_tokens is not None
    assert again.num_cached_tokens > len(PROMPTS[3])
