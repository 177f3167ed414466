"""Weights that change under an engine, and caches that are dropped: by the LLM, the core, and the asynchronous door."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, AsyncLLM, EngineConfig, EngineCore, RequestOutput, SamplingParams
from pagedkv.errors import ConfigurationError, EngineError
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, reference

ROOMY = replace(CONFIG, num_blocks=200)
COUNTED = replace(ROOMY, weights_epoch=0)
PARAMS = SamplingParams(max_tokens=8)
PROMPT = PROMPTS[3]  # 37 tokens: 9 whole blocks
NUM_WHOLE = 36


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


def train(model: PreTrainedModel, seed: int = 0) -> None:
    """Change all matrices in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=generator))


def dense(model: PreTrainedModel, prompt: list[int], num_new: int = 8) -> tuple[int, ...]:
    return tuple(reference(model, [prompt], num_new)[0].token_ids)


def ask(llm: LLM) -> RequestOutput:
    return llm.generate([PROMPT], PARAMS)[0]


@pytest.mark.parametrize("door", [LLM, EngineCore])
@pytest.mark.parametrize(("config", "epoch"), [(ROOMY, "second"), (COUNTED, 1)])
def test_nothing_that_old_weights_computed_is_hit(
    model: PreTrainedModel, door: type, config: EngineConfig, epoch: str | int
) -> None:
    llm = LLM(model, config)
    engine = llm if door is LLM else llm.core
    ask(llm)
    assert ask(llm).num_cached_tokens == NUM_WHOLE
    train(model)
    engine.set_weights_epoch(epoch)
    fresh = ask(llm)
    assert fresh.num_cached_tokens == 0
    assert fresh.token_ids == dense(model, PROMPT)
    again = ask(llm)
    assert again.num_cached_tokens == NUM_WHOLE
    assert again.token_ids == fresh.token_ids


@pytest.mark.parametrize("door", [LLM, EngineCore])
def test_a_reset_drops_all_that_is_cached(model: PreTrainedModel, door: type) -> None:
    llm = LLM(model, ROOMY)
    ask(llm)
    (llm if door is LLM else llm.core).reset_prefix_cache()
    assert ask(llm).num_cached_tokens == 0
    assert ask(llm).num_cached_tokens == NUM_WHOLE


def test_requests_under_way_go_on_and_what_they_hold_of_old_weights_is_hit_by_no_one(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, num_host_blocks=60, preemption="swap"))
    (request,) = llm.submit([PROMPT], SamplingParams(max_tokens=20))
    while len(request.samples[0].token_ids) < 5:
        llm.step()
    before = list(request.samples[0].token_ids)
    llm.set_weights_epoch("second", change=lambda: train(model))
    assert ask(llm).num_cached_tokens == 0
    while not request.is_finished:
        llm.step()
        llm.core.space.check()
    assert request.samples[0].token_ids[:5] == before
    assert len(request.samples[0].token_ids) == 20
    (later,) = llm.generate([request.tokens_of(request.samples[0]).tolist()], PARAMS)
    assert later.num_cached_tokens == NUM_WHOLE, "of the one that was asked with the new weights"


def test_hits_may_rest_on_weights_of_as_many_epochs_back_as_is_said(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(COUNTED, max_epoch_lag=1))
    ask(llm)
    llm.set_weights_epoch(1)
    assert ask(llm).num_cached_tokens == NUM_WHOLE
    llm.set_weights_epoch(2)
    assert ask(llm).num_cached_tokens == 0


@pytest.mark.parametrize(
    ("config", "epoch", "message"),
    [
        (ROOMY, 1, r"weights_epoch must be text, got 1: .* EngineConfig\(weights_epoch=0\)"),
        (COUNTED, "second", "weights_epoch must be a number"),
        (replace(COUNTED, weights_epoch=5), 4, "cannot go back from 5 to 4"),
    ],
)
def test_an_epoch_of_another_kind_or_from_before_is_refused_and_changes_nothing(
    model: PreTrainedModel, config: EngineConfig, epoch: str | int, message: str
) -> None:
    llm = LLM(model, config)
    ask(llm)
    changes: list[int] = []
    with pytest.raises(ConfigurationError, match=message):
        llm.set_weights_epoch(epoch, change=lambda: changes.append(1))
    assert not changes
    assert ask(llm).num_cached_tokens == NUM_WHOLE


def test_an_engine_that_has_failed_has_no_new_epoch(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    handle = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(AssertionError("a fault of ours")))
    with pytest.raises(EngineError, match="a fault of ours"):
        ask(llm)
    handle.remove()
    with pytest.raises(EngineError, match="failed before"):
        llm.set_weights_epoch("second")
    with pytest.raises(EngineError, match="failed before"):
        llm.reset_prefix_cache()


# From an event loop


def test_weights_change_between_two_steps_of_an_engine_that_serves(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    log: list[str] = []

    def change() -> None:
        assert log[-1] != "a pass begins", "a pass computes with these weights"
        train(model)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            first = await engine.generate(PROMPT, PARAMS).output()
            stream = engine.generate(PROMPTS[0], SamplingParams(max_tokens=40))
            await stream.accepted()
            await engine.set_weights_epoch("second", change=change)
            second = await engine.generate(PROMPT, PARAMS).output()
            assert second.num_cached_tokens == 0
            assert second.token_ids == dense_after
            assert first.token_ids == dense_before
            assert (await stream.output()).completions[0].finish_reason == "length"
            assert (await engine.generate(PROMPT, PARAMS).output()).num_cached_tokens == NUM_WHOLE
            await engine.reset_prefix_cache()
            assert (await engine.generate(PROMPT, PARAMS).output()).num_cached_tokens == 0

    dense_before = dense(model, PROMPT)
    twin = make_model("llama")
    train(twin)
    dense_after = dense(twin, PROMPT)
    model.register_forward_pre_hook(lambda *_: log.append("a pass begins"))
    model.register_forward_hook(lambda *_: log.append("it is over"))
    asyncio.run(main())


def test_what_goes_wrong_is_told_to_the_caller_and_the_engine_goes_on(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            await engine.generate(PROMPT, PARAMS).output()
            with pytest.raises(ConfigurationError, match="weights_epoch must be text"):
                await engine.set_weights_epoch(1)
            assert (await engine.generate(PROMPT, PARAMS).output()).num_cached_tokens == NUM_WHOLE
            with pytest.raises(ZeroDivisionError):
                await engine.set_weights_epoch("second", change=lambda: 1 / 0)
            assert (await engine.generate(PROMPT, PARAMS).output()).num_cached_tokens == 0, "some weights may be new"
        with pytest.raises(EngineError, match="closed"):
            await engine.set_weights_epoch("third")
        with pytest.raises(EngineError, match="closed"):
            await engine.reset_prefix_cache()

    asyncio.run(main())


def test_who_waits_when_the_engine_fails_is_told(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)

    async def main() -> None:
        engine = AsyncLLM(llm)
        stream = engine.generate(PROMPTS[0], PARAMS)
        await stream.accepted()
        asked: list[asyncio.Future[None]] = []

        def fail(*_: object) -> None:
            asyncio.run_coroutine_threadsafe(ask_late(), loop).result()
            raise AssertionError("out of order")

        async def ask_late() -> None:
            asked.append(asyncio.ensure_future(engine.reset_prefix_cache()))
            await asyncio.sleep(0)

        loop = asyncio.get_running_loop()
        handle = model.register_forward_hook(fail)
        with pytest.raises(EngineError, match="out of order"):
            await engine.generate(PROMPTS[1], PARAMS).output()
        with pytest.raises(EngineError, match="out of order"):
            await asked[0]
        handle.remove()
        await engine.aclose()

    asyncio.run(main())
