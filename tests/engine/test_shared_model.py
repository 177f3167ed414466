"""Several engines over one model, in several threads: each answers rightly, and the model is left as it was."""

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedkv.engine import LLM, AsyncLLM, SamplingParams
from pagedkv.engine.self_test import ask_dense
from pagedkv.errors import EngineError
from pagedkv.probe.compat import IMPLEMENTATION, BorrowedModel
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, reference_of

ROOMY = replace(CONFIG, num_blocks=200)
PARAMS = SamplingParams(max_tokens=12)
NUM_ROUNDS = 4


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(autouse=True)
def _hasty() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def require_as_it_was(model: PreTrainedModel, implementation: str) -> None:
    assert model.config._attn_implementation == implementation
    with torch.inference_mode():
        cast("Any", model).generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2, do_sample=False)


def serve(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for _ in range(NUM_ROUNDS) for output in llm.generate(PROMPTS, PARAMS)]


def test_two_engines_in_two_threads_take_turns(model: PreTrainedModel) -> None:
    implementation = model.config._attn_implementation
    expected = [tuple(each.token_ids) for each in reference_of("llama", PROMPTS, 12)] * NUM_ROUNDS
    engines = [LLM(model, ROOMY) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(serve, engines)) == [expected] * 2
    require_as_it_was(model, implementation)


def test_engines_are_made_and_asked_for_dense_answers_while_another_one_serves(model: PreTrainedModel) -> None:
    """A probe, a self-test and a dense answer borrow the model as a step does."""
    implementation = model.config._attn_implementation
    serving = LLM(model, ROOMY)
    expected = [tuple(each.token_ids) for each in reference_of("llama", PROMPTS, 12)]
    with ThreadPoolExecutor(2) as threads:
        served = threads.submit(serve, serving)
        others = [threads.submit(LLM, model, replace(ROOMY, self_test=True)).result() for _ in range(3)]
        dense = [threads.submit(ask_dense, model, others[0].groups, prompt, 12).result() for prompt in PROMPTS]
    assert served.result() == expected * NUM_ROUNDS
    assert [each.token_ids for each in dense] == expected
    require_as_it_was(model, implementation)


def test_two_asynchronous_engines_over_one_model_serve_side_by_side(model: PreTrainedModel) -> None:
    implementation = model.config._attn_implementation
    expected = [tuple(each.token_ids) for each in reference_of("llama", PROMPTS, 12)]

    async def main() -> None:
        async with AsyncLLM(LLM(model, ROOMY)) as one, AsyncLLM(LLM(model, ROOMY)) as other:
            streams = [engine.generate(prompt, PARAMS) for engine in (one, other) for prompt in PROMPTS]
            outputs = await asyncio.gather(*(stream.output() for stream in streams))
        assert [output.token_ids for output in outputs] == expected * 2

    asyncio.run(main())
    require_as_it_was(model, implementation)


def test_models_of_one_config_take_turns(model: PreTrainedModel) -> None:
    """What is changed for a pass is the config: two models may share it."""
    twin = cast("PreTrainedModel", type(model)(model.config).eval())
    twin.load_state_dict(model.state_dict())
    assert twin.config is model.config
    implementation = model.config._attn_implementation
    expected = [tuple(each.token_ids) for each in reference_of("llama", PROMPTS, 12)] * NUM_ROUNDS
    engines = [LLM(each, ROOMY) for each in (model, twin)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(serve, engines)) == [expected] * 2
    require_as_it_was(model, implementation)


def test_who_borrows_a_model_keeps_others_out_and_may_borrow_it_again(model: PreTrainedModel) -> None:
    one, other = BorrowedModel(model), BorrowedModel(model)
    log: list[str] = []

    def borrow() -> None:
        with other.calling("eager"):
            log.append(f"other finds {IMPLEMENTATION}" if len(log) < 2 else "other")

    with one.calling(IMPLEMENTATION):
        thread = threading.Thread(target=borrow)
        thread.start()
        with one.dense(has_cap=True):
            assert model.config._attn_implementation == "eager"
        assert model.config._attn_implementation == IMPLEMENTATION
        log += ["one", "one ends"]
    thread.join()
    assert log == ["one", "one ends", "other"]
    require_as_it_was(model, "sdpa")


def test_a_step_that_fails_gives_the_model_back(model: PreTrainedModel) -> None:
    implementation = model.config._attn_implementation
    failing, other = LLM(model, ROOMY), LLM(model, ROOMY)

    def fail(*_: object) -> None:
        raise ValueError("out of order")

    handle = model.register_forward_hook(fail)
    assert all("out of order" in (output.error or "") for output in failing.generate(PROMPTS, PARAMS))
    handle.remove()
    require_as_it_was(model, implementation)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(serve, other).result()


def test_a_dense_call_in_the_middle_of_a_step_hears_why_it_fails(model: PreTrainedModel) -> None:
    with BorrowedModel(model).calling(IMPLEMENTATION), pytest.raises(EngineError, match="in another thread"):
        model(torch.tensor([[1, 2]]))


def test_models_are_copied_and_saved_as_before(model: PreTrainedModel, tmp_path: Any) -> None:  # noqa: ANN401 - a path
    """What keeps engines apart is no part of a model."""
    llm = LLM(model, ROOMY)
    copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    again = cast("Any", AutoModelForCausalLM).from_pretrained(tmp_path).eval()
    assert LLM(again, ROOMY).generate(PROMPTS, PARAMS)[0].token_ids == llm.generate(PROMPTS, PARAMS)[0].token_ids


# One engine, several threads


def test_an_engine_has_one_driver(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            for use in (lambda: AsyncLLM(llm), lambda: llm.generate(PROMPTS, PARAMS), llm.step, llm.reset_prefix_cache):
                with pytest.raises(EngineError, match="another thread drives this engine"):
                    use()
            assert (await engine.generate(PROMPTS[0], PARAMS).output()).completions[0].finish_reason == "length"

    asyncio.run(main())
    assert llm.generate(PROMPTS, PARAMS)[0].completions[0].finish_reason == "length"


def test_a_step_in_another_thread_is_refused_and_changes_nothing(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    uses: list[Callable[[], object]] = [
        llm.step,
        lambda: llm.submit(PROMPTS, PARAMS),
        lambda: llm.core.abort(request),
    ]
    refusals: list[str] = []

    def meddle(*_: object) -> None:
        with ThreadPoolExecutor(1) as thread:
            refusals.extend(str(thread.submit(use).exception()) for use in uses)

    (request,) = llm.submit(PROMPTS[:1], PARAMS)
    handle = model.register_forward_hook(meddle)
    llm.step()
    handle.remove()
    assert len(refusals) == 3
    assert all("another thread drives this engine" in each for each in refusals)
    while not request.is_finished:
        llm.step()
        llm.core.space.check()
    assert tuple(request.samples[0].token_ids) == tuple(reference_of("llama", PROMPTS[:1], 12)[0].token_ids)
