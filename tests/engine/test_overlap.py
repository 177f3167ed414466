"""Steps that overlap answer as steps one by one: every kind of request, every kind of memory, late ends among them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, EngineRequest, Intent, PromptLookup, RequestOutput, SamplingParams
from pagedkv.errors import EngineError
from tests.engine.families import make_model, moved
from tests.engine.serving import CONFIG, PROMPTS, poison, serve
from tests.engine.test_sampled_answers import Letters, Slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_NEW = 14
GREEDY = SamplingParams(max_tokens=NUM_NEW)
DRAWN = SamplingParams(max_tokens=NUM_NEW, temperature=1.0, seed=5)
ROOMY = replace(CONFIG, num_blocks=200)
MEMORY: dict[str, EngineConfig] = {
    "room": ROOMY,
    "recompute": replace(CONFIG, num_blocks=22),
    "swap": replace(CONFIG, num_blocks=22, preemption="swap", num_host_blocks=40, min_partial_hit=1),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return moved(make_model("llama"), DEVICE)


def overlapped(config: EngineConfig) -> EngineConfig:
    """Let the steps of an engine overlap."""
    return replace(config, overlap=True)


def answers(outputs: list[RequestOutput]) -> list[object]:
    """Take what may not differ; log-probabilities may by rounding, since other rows stand beside."""
    return [
        (each.token_ids, each.finish_reason, each.text, each.stop, output.error)
        for output in outputs
        for each in output.completions
    ]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """List the log-probabilities of all tokens that have some."""
    of_answers = [one for output in outputs for each in output.completions for one in each.logprobs or ()]
    return [
        one.logprob
        for one in (*of_answers, *(one for output in outputs for one in output.prompt_logprobs or ()))
        if one
    ]


def wishes(ends: tuple[int, ...]) -> list[SamplingParams]:
    """Requests with all features: with tokens that end answers early, as late stops are found."""
    return [
        GREEDY,
        replace(GREEDY, stop_token_ids=ends),
        replace(DRAWN, stop_token_ids=ends, logprobs=2),
        replace(DRAWN, n=3, stop_token_ids=ends),
        replace(DRAWN, top_k=5, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=6, stop_token_ids=ends),
        replace(GREEDY, stop=["C", "zz"], frequency_penalty=0.5, bad_words=[[5], [7, 9]]),
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, prompt_logprobs=1, logprobs=1),
        replace(DRAWN, logits_processors=[Slow(2)], stop_token_ids=ends),
        SamplingParams(max_tokens=8, num_beams=3, n=2),
        replace(GREEDY, logit_bias=dict.fromkeys(range(199), -float("inf"))),
    ]


def arriving(llm: LLM, params: list[SamplingParams], intents: Sequence[Intent] = ()) -> list[EngineRequest]:
    """Serve a request for each wish, which arrive one after the other; the space proves itself after each step."""
    intents = intents or [Intent()] * len(params)
    requests: list[EngineRequest] = []
    num_steps = 0
    while len(requests) < len(params) or llm.core.has_work:
        if len(requests) < len(params) and num_steps % 2 == 0:
            number = len(requests)
            requests += llm.submit([PROMPTS[number % len(PROMPTS)]], params[number], intents[number])
        llm.step()
        num_steps += 1
        llm.core.space.check()
        assert num_steps < 2_000, "a request is never served"
    return requests


@pytest.mark.parametrize("memory", MEMORY)
def test_every_kind_of_request_is_answered_as_without_overlap(model: PreTrainedModel, memory: str) -> None:
    """Also where several kinds share steps, and where rows are preempted."""
    found: list[list[object]] = []
    results: list[list[float]] = []
    preempted: list[int] = []
    for config in (MEMORY[memory], overlapped(MEMORY[memory])):
        llm = LLM(model, config, tokenizer=Letters())
        poison(llm)
        requests = arriving(llm, wishes((9, 33, 77, 101, 150, 180, 12, 60)))
        outputs = [llm.output(request) for request in requests]
        found.append(answers(outputs))
        results.append(logprobs(outputs))
        preempted.append(sum(request.num_preemptions for request in requests))
        assert llm.core.space.num_live_blocks() == 0
    assert found[0] == found[1]
    assert results[1] == pytest.approx(results[0], abs=1e-4)
    assert (memory == "room") == (preempted[1] == 0)


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "bamba"])
def test_windows_latents_and_states_are_served_so_too(name: str) -> None:
    """A state advances in place: what follows an end that was not known is never published."""
    model = moved(make_model(name), DEVICE)
    config = replace(CONFIG, num_blocks=200)
    params = [replace(GREEDY, stop_token_ids=tuple(range(0, 199, 7)))] * 4 + [GREEDY, replace(DRAWN, n=2)]
    found = []
    for each in (config, overlapped(config)):
        llm = LLM(model, each)
        poison(llm)
        requests = arriving(llm, params)
        again = llm.generate([request.tokens_of(request.samples[0]).tolist() for request in requests], GREEDY)
        found.append(answers([*(request.output() for request in requests), *again]))
    assert found[0] == found[1]


def test_a_late_end_costs_one_token_which_is_no_output(model: PreTrainedModel) -> None:
    """The receipt has it as abandoned; what is computed and cached is what it is without overlap."""
    plain, ahead = LLM(model, ROOMY), LLM(model, overlapped(ROOMY))
    end = plain.generate(PROMPTS[:1], GREEDY)[0].token_ids[6]
    params = replace(GREEDY, stop_token_ids=(end,))
    plain.reset_prefix_cache()
    first, late = (llm.generate(PROMPTS[:1], params)[0] for llm in (plain, ahead))
    assert late.completions == first.completions
    assert late.completions[0].stop == end
    assert late.receipt.num_abandoned == 1
    assert first.receipt.num_abandoned == 0
    assert late.receipt.num_computed == first.receipt.num_computed
    prompt = [*PROMPTS[0], *late.token_ids, 5, 6, 7, 8]
    assert ahead.generate([prompt], GREEDY)[0].num_cached_tokens == (len(PROMPTS[0]) + len(late.token_ids) - 1) // 4 * 4


def test_the_host_has_a_steps_tokens_when_the_next_one_is_launched(model: PreTrainedModel) -> None:
    """A step is in flight between two calls; nothing is in flight when nothing is left to serve."""
    llm = LLM(model, overlapped(ROOMY))
    launched: list[int] = []
    launch = llm.core.executor.launch

    def counted(plan: Any, forward: Callable[..., object]) -> object:  # noqa: ANN401 - as they are
        launched.append(len(request.samples[0].token_ids))
        return launch(plan, forward)

    llm.core.executor.launch = counted  # type: ignore[method-assign,assignment]
    request = llm.submit(PROMPTS[2:3], replace(GREEDY, max_tokens=5))[0]
    while llm.core.has_work:
        llm.step()
    assert launched[:5] == [0, 0, 1, 2, 3]
    llm.core.executor.wait()  # a GPU may still compute a step behind the end, whose token is not awaited
    assert llm.core.executor.num_in_flight == 0
    assert request.is_finished


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_abort_in_flight_keeps_what_was_known(model: PreTrainedModel, num_steps: int) -> None:
    """What the step in flight sampled for it is dropped, and others are not disturbed."""
    expected = [output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:3], GREEDY)]
    llm = LLM(model, overlapped(ROOMY))
    requests = llm.submit(PROMPTS[:3], GREEDY)
    for _ in range(num_steps):
        llm.step()
    llm.core.abort(requests[1])
    known = tuple(requests[1].samples[0].token_ids)
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    assert requests[1].output().token_ids == known == expected[1][: len(known)]
    assert [requests[place].output().token_ids for place in (0, 2)] == [expected[0], expected[2]]
    assert llm.core.space.num_live_blocks() == 0


def test_forks_epochs_and_resets_begin_behind_the_step_in_flight(model: PreTrainedModel) -> None:
    """They see all tokens that were launched, as without overlap."""
    llm = LLM(model, overlapped(replace(ROOMY, weights_epoch=0)))
    request = llm.submit(PROMPTS[:1], GREEDY)[0]
    while len(request.samples[0].token_ids) < 4:
        llm.step()
    before = llm.core.space.num_live_blocks()
    child = request.fork(params=DRAWN)
    assert len(child.prompt_token_ids) == len(PROMPTS[0]) + 5
    assert child.num_missing_tokens == 1
    assert llm.core.space.num_live_blocks() == before
    llm.reset_prefix_cache()
    llm.set_weights_epoch(1)
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    plain = LLM(model, ROOMY)
    assert child.output().token_ids == plain.generate([child.prompt_token_ids.tolist()], DRAWN)[0].token_ids
    assert request.output().token_ids == plain.generate(PROMPTS[:1], GREEDY)[0].token_ids
    assert request.output().epochs == (0, 1)


def test_guesses_sit_out_every_second_step_and_stay_right(model: PreTrainedModel) -> None:
    """A lookup needs the tokens on the host."""
    config = replace(ROOMY, speculation=PromptLookup(num_tokens=3))
    found, expected = (serve(LLM(model, each))[0] for each in (overlapped(config), config))
    assert [each.output().token_ids for each in found] == [each.output().token_ids for each in expected]


@pytest.mark.parametrize(("memory", "first"), [("room", 0), ("recompute", 1), ("swap", 0)])
def test_right_guesses_stand_beside_requests_that_run_ahead(model: PreTrainedModel, memory: str, first: int) -> None:
    """Every second request has a right prediction, so it takes several tokens in a step where others take one."""
    params = wishes((9, 33, 77, 101, 150, 180, 12, 60))
    plain = LLM(model, MEMORY[memory], tokenizer=Letters())
    expected = [plain.output(request) for request in arriving(plain, params)]
    intents = [
        Intent(prediction=output.token_ids) if number % 2 == first and output.token_ids else Intent()
        for number, output in enumerate(expected)
    ]
    llm = LLM(model, replace(overlapped(MEMORY[memory]), predicted_tokens=3), tokenizer=Letters())
    poison(llm)
    outputs = [llm.output(request) for request in arriving(llm, params, intents)]
    assert answers(outputs) == answers(expected)
    assert sum(output.num_accepted_tokens for output in outputs) > 5


def test_an_engine_that_fails_has_the_tokens_that_are_known(model: PreTrainedModel) -> None:
    """What the step before it sampled is not on the host, and is no output."""
    expected = LLM(model, ROOMY).generate(PROMPTS[:1], GREEDY)[0].token_ids
    llm = LLM(model, overlapped(ROOMY))
    request = llm.submit(PROMPTS[:1], GREEDY)[0]
    for _ in range(5):
        llm.step()

    def fail(*_: object) -> torch.Tensor:
        raise AssertionError("a fault of ours")

    llm.core._parts.runner.compute = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineError, match="a step failed, and the engine is at its end: AssertionError: a fault of"):
        llm.step()
    known = request.output().token_ids
    assert known
    assert known == expected[: len(known)]
    with pytest.raises(EngineError, match="has failed before"):
        llm.step()
    llm.core.space.check()
    assert llm.core.executor.num_in_flight == 0
    (row,) = request.scheduled.rows
    assert llm.core.space.num_tokens(row) == len(PROMPTS[0]) + len(known) - 1  # all that is computed


def test_a_token_from_elsewhere_is_noticed(model: PreTrainedModel) -> None:
    """The negative control: rows that take each other's tokens answer otherwise."""
    llm = LLM(model, overlapped(ROOMY))
    keep = llm.core._parts.runner.last_tokens.keep
    llm.core._parts.runner.last_tokens.keep = lambda rows, token_ids: keep(rows[::-1].copy(), token_ids)  # type: ignore[method-assign]
    expected = [output.token_ids for output in LLM(model, ROOMY).generate(PROMPTS[:3], GREEDY)]
    assert [output.token_ids for output in llm.generate(PROMPTS[:3], GREEDY)] != expected
