"""Steps that fail: answers are as if none had failed; only requests that fail twice end, with the reason."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from pagedkv.engine import (
    LLM,
    AnswerStream,
    AsyncLLM,
    EngineConfig,
    EngineRequest,
    PromptLookup,
    SamplingParams,
    StepRecord,
)
from pagedkv.engine.step import STEPS_UNTIL_FULL, FailedSteps, may_be_retried
from pagedkv.errors import DeviceLostError, EngineError
from pagedkv.space import Receipt
from tests.engine.families import make_model, moved
from tests.engine.serving import CONFIG, PROMPTS, poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOMY = replace(CONFIG, num_blocks=200)
MEMORY: dict[str, EngineConfig] = {
    "room": ROOMY,
    "uncached": replace(ROOMY, prefix_caching=False),
    "recompute": replace(CONFIG, num_blocks=22),
    "swap": replace(CONFIG, num_blocks=22, preemption="swap", num_host_blocks=40, min_partial_hit=1),
    "guesses": replace(ROOMY, speculation=PromptLookup(num_tokens=3)),
}
GREEDY = SamplingParams(max_tokens=8)
PARAMS = (
    GREEDY,
    replace(GREEDY, stop_token_ids=tuple(range(0, 199, 5))),
    replace(GREEDY, n=3, temperature=1.0, seed=5, repetition_penalty=1.2),
    replace(GREEDY, temperature=0.8, top_k=9, seed=3, logprobs=1),
    replace(GREEDY, num_beams=2, n=2, max_tokens=5),
)
Answer = list[tuple[tuple[int, ...], str | None]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return moved(make_model("llama"), DEVICE)


def answers(llm: LLM, params: tuple[SamplingParams, ...] = PARAMS) -> tuple[list[Answer], list[StepRecord]]:
    """Serve a request for each of these parameters, which arrive one after the other; all receipts add up."""
    requests: list[EngineRequest] = []
    records: list[StepRecord] = []
    while len(requests) < len(params) or llm.core.has_work:
        if len(requests) < len(params) and len(records) % 2 == 0:
            requests += llm.submit([PROMPTS[len(requests) % len(PROMPTS)]], params[len(requests)])
        records.append(llm.step())
        llm.core.space.check()
        assert len(records) < 500, "a request is never served"
    assert llm.core.space.num_live_blocks() == 0
    receipts = sum((request.output().receipt for request in requests), Receipt())
    assert receipts == llm.core.space.statistics().receipts
    return [
        [(each.token_ids, each.finish_reason) for each in request.output().completions] for request in requests
    ], records


@contextmanager
def failing(module: torch.nn.Module, at: int, problem: Exception, num: int = 1) -> Iterator[list[int]]:
    """Let some calls of a module raise, from number ``at`` on; gives a list of the calls that did."""
    calls, failed = [0], []

    def fail(*_: object) -> None:
        calls[0] += 1
        if at <= calls[0] < at + num:
            failed.append(calls[0])
            raise problem

    handle = module.register_forward_hook(fail)
    try:
        yield failed
    finally:
        handle.remove()


@cache
def undisturbed(model: PreTrainedModel, memory: str) -> list[Answer]:
    """Answer without a failure, and without overlap."""
    return answers(LLM(model, MEMORY[memory]))[0]


PROBLEMS = (ValueError("mine"), torch.OutOfMemoryError("no room"), MemoryError("no room"))


@settings(max_examples=12)
@given(
    config=st.tuples(st.sampled_from(list(MEMORY)), st.booleans()),
    place=st.sampled_from(("embedding", 0, 1, "head", "sampler")),
    at=st.integers(1, 24),
    problem=st.sampled_from(PROBLEMS),
)
def test_a_step_that_fails_once_changes_no_answer(
    model: PreTrainedModel, config: tuple[str, bool], place: int | str, at: int, problem: Exception
) -> None:
    """Whichever step fails, in whichever layer, or when its tokens are sampled; with overlap and without."""
    memory, overlap = config
    params = tuple(each for each in PARAMS if place != "sampler" or each.num_beams == 1)
    llm = LLM(model, replace(MEMORY[memory], overlap=overlap))
    poison(llm)
    if place == "sampler":
        fail_when_sampling(llm, at, problem)
        found, records = answers(llm, params)
    else:
        network: Any = model
        modules = {"embedding": network.get_input_embeddings(), "head": network.lm_head}
        module = modules[place] if isinstance(place, str) else network.model.layers[place]
        with failing(module, at, problem):
            found, records = answers(llm, params)
    assert found == undisturbed(model, memory)[: len(params)]
    reasons = [record.failure for record in records if record.failure is not None]
    assert reasons in ([], [f"{type(problem).__name__}: {problem}"])
    assert all(not record.num_tokens and not record.num_sampled for record in records if record.failure is not None)


def fail_when_sampling(llm: LLM, at: int, problem: Exception) -> None:
    """Let the sampling of one step raise."""
    begin, calls = llm.core._loop._answering.begin, [0]

    def fail(logits: torch.Tensor, rows: Any) -> object:  # noqa: ANN401 - as they are
        calls[0] += 1
        if calls[0] == at:
            raise problem
        return begin(logits, rows)

    llm.core._loop._answering.begin = fail  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "bamba"])
def test_windows_latents_and_states_are_computed_again(name: str) -> None:
    """What a window has released, and a state that advanced in place, is computed again from known tokens."""
    network: Any = moved(make_model(name), DEVICE)
    params = (*[replace(GREEDY, max_tokens=12)] * 3, replace(GREEDY, n=2, temperature=1.0, seed=4))
    expected, _ = answers(LLM(network, ROOMY), params)
    for overlap, at in ((False, 4), (True, 9)):
        llm = LLM(network, replace(ROOMY, overlap=overlap))
        poison(llm)
        with failing(network.model.layers[-1], at, ValueError("mine")) as failed:
            found, records = answers(llm, params)
        assert found == expected
        assert failed
        assert sum(record.failure is not None for record in records) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_of_a_step_that_fails_twice_end_and_others_go_on(model: PreTrainedModel, *, overlap: bool) -> None:
    """The error has the reason; requests that decode or wait are not affected."""
    llm = LLM(model, replace(ROOMY, overlap=overlap, max_sequences=2))
    expected = LLM(model, ROOMY).generate(PROMPTS[:3], GREEDY)
    (first,) = llm.submit(PROMPTS[:1], GREEDY)
    while len(first.samples[0].token_ids) < 3:
        llm.step()
    second, third = llm.submit(PROMPTS[1:3], GREEDY)
    with failing(model, 1, ValueError("mine"), num=2):
        records = [llm.step(), llm.step()]
    assert [record.failure for record in records] == ["ValueError: mine"] * 2
    assert [record.num_finished for record in records] == [0, 1]
    assert second.is_finished
    assert second.error == "a step that computes it failed twice: ValueError: mine"
    assert second.output().completions[0].finish_reason == "failed"
    assert second.num_cached_tokens is None  # it never ran
    while llm.core.has_work:
        assert llm.step().failure is None
        llm.core.space.check()
    assert [each.output().token_ids for each in (first, third)] == [expected[0].token_ids, expected[2].token_ids]
    assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_decode_end_with_what_they_have_if_no_prompt_is_to_blame(
    model: PreTrainedModel, *, overlap: bool
) -> None:
    """A model that is out of order ends all requests, each with its tokens, and serves when it is in order again."""
    expected = LLM(model, ROOMY).generate(PROMPTS[:2], GREEDY)
    llm = LLM(model, replace(ROOMY, overlap=overlap))
    requests = llm.submit(PROMPTS[:2], GREEDY)
    while min(len(request.samples[0].token_ids) for request in requests) < 3:
        llm.step()
    with failing(model, 1, ValueError("mine"), num=2):
        while llm.core.has_work:
            llm.step()
    for request, whole in zip(requests, expected, strict=True):
        (completion,) = request.output().completions
        assert completion.finish_reason == "failed"
        assert len(completion.token_ids) >= 3
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    llm.core.space.check()
    assert llm.core.space.num_live_blocks() == 0
    assert [output.token_ids for output in llm.generate(PROMPTS[:2], GREEDY)] == [each.token_ids for each in expected]


def test_after_a_shortage_of_memory_steps_are_half_as_large(model: PreTrainedModel) -> None:
    """And whole again after some steps without one."""
    llm = LLM(model, replace(ROOMY, max_tokens=400, max_batched_tokens=16))
    prompt = [*range(3, 190), *range(3, 190)]
    request, *_ = llm.submit([prompt], replace(GREEDY, max_tokens=1))
    with failing(model, 3, torch.OutOfMemoryError("no room"), num=2):
        sizes = [llm.step().num_prefilled for _ in range(6)]
    assert sizes[:4] == [16, 16, 0, 0]
    assert request.is_finished
    again, *_ = llm.submit([prompt], replace(GREEDY, max_tokens=1))
    sizes = []
    while not again.is_finished:
        sizes.append(llm.step().num_prefilled)
    assert sizes[:STEPS_UNTIL_FULL] == [4] * STEPS_UNTIL_FULL
    assert sizes[STEPS_UNTIL_FULL] == 16
    assert (
        again.output().token_ids
        == LLM(model, llm.core.config).generate([prompt], replace(GREEDY, max_tokens=1))[0].token_ids
    )


def test_a_retry_is_one_and_errors_of_this_library_have_none() -> None:
    """As in :class:`FailedSteps`."""
    steps = FailedSteps(7)
    found = []
    for problem in (ValueError("a"), None, ValueError("b"), ValueError("c"), ValueError("d"), MemoryError(), None):
        steps.note_success() if problem is None else steps.note_failure(problem)
        found.append((steps.is_final, steps.max_batched_tokens))
    assert found == [(False, 7), (False, 7), (False, 7), (True, 7), (False, 7), (True, 3), (False, 3)]
    assert steps.reason == "MemoryError: "
    for _ in range(9):
        steps.note_failure(MemoryError())
    assert steps.max_batched_tokens == 1
    assert may_be_retried(RuntimeError("shapes do not match"))
    assert may_be_retried(torch.OutOfMemoryError("CUDA out of memory"))
    assert not may_be_retried(AssertionError())
    assert not may_be_retried(EngineError("other layers"))
    assert not may_be_retried(RuntimeError("CUDA error: misaligned address"))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_device_ends_the_engine_and_every_request_has_what_was_known(
    model: PreTrainedModel, *, overlap: bool
) -> None:
    """No request is left without an end."""
    expected = LLM(model, ROOMY).generate(PROMPTS[:2], GREEDY)
    llm = LLM(model, replace(ROOMY, overlap=overlap))
    requests = llm.submit(PROMPTS[:2], GREEDY)
    while min(len(request.samples[0].token_ids) for request in requests) < 3:
        llm.step()
    with (
        failing(model, 1, RuntimeError("CUDA error: an illegal memory access was encountered")),
        pytest.raises(EngineError, match="a step failed, and the engine is at its end: DeviceLostError") as raised,
    ):
        llm.step()
    assert isinstance(raised.value.__cause__, DeviceLostError)
    for request, whole in zip(requests, expected, strict=True):
        (completion,) = request.output().completions
        assert completion.finish_reason == "failed"
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) >= 3
        assert "illegal memory access" in (request.error or "")
    with pytest.raises(EngineError, match="has failed before"):
        llm.generate(PROMPTS[:1])


async def listen(stream: AnswerStream, seen: list[int]) -> None:
    """Note the tokens of a stream as they come."""
    async for update in stream:
        seen += update.token_ids


def test_streams_of_a_lost_device_give_their_tokens_and_then_the_error(model: PreTrainedModel) -> None:
    """Their result has what was known, as that of a request that failed."""
    llm = LLM(model, ROOMY)

    async def main() -> None:
        engine = AsyncLLM(llm)
        streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS[:2]]
        for stream in streams:
            seen: list[int] = []
            with pytest.raises(EngineError, match="illegal memory access"):
                await listen(stream, seen)
            assert stream.result is not None
            assert stream.result.completions[0].finish_reason == "failed"
            assert seen == list(stream.result.token_ids)
            assert seen or stream is not streams[0]
            with pytest.raises(EngineError, match="illegal memory access"):
                await stream.output()
        await engine.aclose()

    with failing(model, 5, RuntimeError("CUDA error: an illegal memory access was encountered"), num=99):
        asyncio.run(asyncio.wait_for(main(), 60.0))


def test_a_stream_goes_on_after_a_failed_step(model: PreTrainedModel) -> None:
    """The stream is as without the failure; the record of the step has it."""
    expected = LLM(model, ROOMY).generate(PROMPTS[:2], GREEDY)
    llm = LLM(model, ROOMY)
    failures: list[str | None] = []
    note: Callable[[StepRecord], None] = lambda record: failures.append(record.failure)  # noqa: E731 - typed so

    async def main() -> list[tuple[int, ...]]:
        async with AsyncLLM(llm, on_step=note) as engine:
            streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS[:2]]
            return [(await stream.output()).token_ids for stream in streams]

    with failing(model, 4, ValueError("mine")):
        found = asyncio.run(asyncio.wait_for(main(), 60.0))
    assert found == [output.token_ids for output in expected]
    assert [failure for failure in failures if failure] == ["ValueError: mine"]


def test_a_failure_that_is_not_undone_is_noticed(model: PreTrainedModel) -> None:
    """The negative control: a row that keeps the token of the failed step has it twice."""
    expected = LLM(model, ROOMY).generate(PROMPTS[:2], GREEDY)
    llm = LLM(model, ROOMY)
    requests = llm.submit(PROMPTS[:2], GREEDY)
    abort = llm.core.scheduler.abort_in_flight

    def forget_to_roll_back() -> object:
        truncate, llm.core.space.truncate = llm.core.space.truncate, lambda *_: None  # type: ignore[method-assign]
        try:
            return abort()
        finally:
            llm.core.space.truncate = truncate  # type: ignore[method-assign]

    llm.core.scheduler.abort_in_flight = forget_to_roll_back  # type: ignore[method-assign,assignment]
    with failing(model, 6, ValueError("mine")), pytest.raises((AssertionError, EngineError)):  # noqa: PT012
        while llm.core.has_work:
            llm.step()
        assert [request.output().token_ids for request in requests] == [output.token_ids for output in expected]
