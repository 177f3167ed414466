"""Thousands of requests that come, leave, expire and branch: nothing leaks, none starves, every answer is right."""

import asyncio
import random

import pytest
from transformers import PreTrainedModel

from pagedkv.engine import LLM, AsyncLLM, SamplingParams
from pagedkv.errors import EngineError
from tests.engine.families import make_model
from tests.engine.load import NUM_NEW, SETTINGS, Load, same_answers
from tests.engine.serving import PROMPTS, reference

NUM_LONG = 10_000
PATIENCE_S = 1200


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=2)


def require_all_sorts(load: Load, num_requests: int) -> None:
    """Or the load would not have tried what it is for."""
    assert sum(load.outcomes.values()) >= num_requests
    assert load.outcomes["length"] > num_requests / 3
    assert min(load.outcomes["aborted"], load.outcomes["deadline"]) > num_requests / 50
    assert load.num_preemptions > num_requests / 50
    assert load.longest_stay < 500


def test_a_load_leaks_nothing_and_starves_nobody(model: PreTrainedModel) -> None:
    load = Load(model, seed=0)
    load.run(300)
    require_all_sorts(load, 300)


@pytest.mark.long
def test_a_load_that_is_guessed_leaks_nothing_either(model: PreTrainedModel) -> None:
    load = Load(model, seed=3, first_life=4)
    load.run(200)
    require_all_sorts(load, 200)
    assert 0 < load.num_accepted < load.num_drafted


@pytest.mark.long
def test_ten_thousand_requests(model: PreTrainedModel) -> None:
    load = Load(model, seed=1)
    load.run(NUM_LONG)
    require_all_sorts(load, NUM_LONG)
    assert load.num_lives > 20
    assert load.outcomes["lost"] > 0
    assert load.num_undone > 0
    assert 0 < load.num_accepted < load.num_drafted


@pytest.mark.parametrize("num_callers", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_callers_who_come_and_go_leave_nothing(model: PreTrainedModel, num_callers: int) -> None:
    draw = random.Random(2)
    expected = reference(model, PROMPTS, NUM_NEW)
    llm = LLM(model, SETTINGS[0])
    reasons: list[str] = []

    async def call(engine: AsyncLLM, place: int, params: SamplingParams, stay: float, *, leaves: int) -> None:
        stream = engine.generate(PROMPTS[place], params, deadline_s=stay)
        num_heard = 0
        async for update in stream:
            num_heard += len(update.token_ids)
            if num_heard > leaves:
                await stream.aclose()
                break
        output = await stream.output()
        for each in output.completions:
            reasons.append(str(each.finish_reason))
            certain = expected[place].num_certain
            assert list(each.token_ids[:certain]) == expected[place].token_ids[: len(each.token_ids)][:certain]

    async def main() -> None:
        async with AsyncLLM(llm, max_waiting=8) as engine:
            calls = []
            for _ in range(num_callers):
                params = same_answers(draw.choice([1, 1, 2]), draw.randrange(1, NUM_NEW + 1))
                stay, leaves = draw.choice([0.0, 1e6, 1e6, 1e6]), draw.choice([0, 3, 99, 99, 99])
                calls.append(call(engine, draw.randrange(len(PROMPTS)), params, stay, leaves=leaves))
            await asyncio.gather(*calls)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert {"length", "deadline"} <= set(reasons) <= {"length", "deadline", "aborted"}
    llm.core.space.check()
    assert not llm.core.has_work
    assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize("fails_at", [0, 3])
def test_callers_of_an_engine_that_fails_all_hear_of_it(model: PreTrainedModel, fails_at: int) -> None:
    num_passes = 0

    def fail(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes > fails_at:
            raise AssertionError("injected")

    async def main() -> list[object]:
        async with AsyncLLM(llm, max_waiting=4) as engine:
            streams = [engine.generate(PROMPTS[place % len(PROMPTS)]) for place in range(40)]
            return list(await asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True))

    llm = LLM(model, SETTINGS[0])
    handle = model.register_forward_pre_hook(fail)
    try:
        outcomes = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    except EngineError:
        return  # the thread was faster than the callers, which then get the error at once
    finally:
        handle.remove()
    assert all(isinstance(outcome, EngineError) and "injected" in str(outcome) for outcome in outcomes)
