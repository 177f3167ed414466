"""A draft model in all that an engine lives through: failures, aborts, new weights, tiers, and what does not fit."""

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from pagedkv.engine import LLM, AsyncLLM, PromptLookup, RequestOutput
from pagedkv.errors import ConfigurationError, UnsupportedModelError
from pagedkv.tiers import FolderTier
from tests.engine.drafts import ROOMY, accepted_at_most, near, run
from tests.engine.families import make_model, moved
from tests.engine.serving import PROMPTS, poison
from tests.engine.test_speculation import GREEDY, WISHES, prompt_of, require_same


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[RequestOutput]:
    """Answer each wish alone, without drafts."""
    return [LLM(model, ROOMY).generate([prompt_of(place)], wish)[0] for place, wish in enumerate(WISHES[:5])]


# What goes wrong, and what changes


@pytest.mark.parametrize("which", ["draft", "target"])
def test_a_pass_that_fails_is_tried_again(model: PreTrainedModel, plain: list[RequestOutput], which: str) -> None:
    draft = copy.deepcopy(model)
    llm = LLM(model, ROOMY, draft_model=draft)
    poison(llm)
    requests = [llm.submit([prompt_of(place)], wish)[0] for place, wish in enumerate(WISHES[:5])]
    failures = 0
    for number in range(200):
        if not llm.core.has_work:
            break
        if number % 3 == 2:  # not twice in a row
            left = [number % 5 if which == "draft" else 0]

            def fail(*_: object, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise ValueError("injected")

            handle = (draft if which == "draft" else model).register_forward_pre_hook(fail)
            failures += llm.step().failure is not None
            handle.remove()
        else:
            assert llm.step().failure is None
        llm.core.space.check()
    assert failures > 1
    for request, expected in zip(requests, plain, strict=False):
        require_same(llm.output(request), expected)
        assert request.num_accepted == accepted_at_most(request)


def test_an_aborted_request_leaves_nothing(model: PreTrainedModel, plain: list[RequestOutput]) -> None:
    llm = LLM(model, ROOMY, draft_model=model)
    poison(llm)
    requests = llm.submit(PROMPTS[:3], [GREEDY, WISHES[1], GREEDY])
    while requests[0].num_accepted < 4:
        llm.step()
    llm.core.abort(requests[0])
    llm.core.space.check()
    run(llm)
    require_same(llm.output(requests[1]), plain[1])
    assert llm.core.space.num_live_blocks() == 0


def test_new_weights_of_both_models_begin_an_epoch(model: PreTrainedModel) -> None:
    target, draft = copy.deepcopy(model), copy.deepcopy(model)
    llm = LLM(target, ROOMY, draft_model=draft)
    llm.generate(PROMPTS[:2], GREEDY)
    other = near(model, scale=0.5)

    def change() -> None:
        for each in (target, draft):
            each.load_state_dict(other.state_dict())

    llm.set_weights_epoch("new", change=change)
    (output,) = llm.generate(PROMPTS[:1], GREEDY)
    require_same(output, LLM(other, ROOMY).generate(PROMPTS[:1], GREEDY)[0])
    assert output.num_cached_tokens == 0
    assert output.num_accepted_tokens == output.num_drafted_tokens > 0
    llm.reset_prefix_cache()
    (output,) = llm.generate(PROMPTS[:1], GREEDY)
    assert (output.num_cached_tokens, output.num_accepted_tokens) == (0, output.num_drafted_tokens)


def test_event_loops_are_served(model: PreTrainedModel, plain: list[RequestOutput]) -> None:
    async def ask() -> tuple[int, ...]:
        async with AsyncLLM(LLM(model, ROOMY, draft_model=model)) as engine:
            return tuple([token async for each in engine.generate(prompt_of(1), WISHES[1]) for token in each.token_ids])

    assert asyncio.run(ask()) == plain[1].token_ids


def test_a_file_of_a_prefix_has_the_keys_of_both_models(model: PreTrainedModel, tmp_path: Path) -> None:
    path, roomy = tmp_path / "prefix", replace(ROOMY, warm_up=False)
    first = LLM(model, roomy, draft_model=model)
    first.generate(PROMPTS[3:4], GREEDY)
    assert first.export(PROMPTS[3], path) == 36
    second = LLM(model, roomy, draft_model=copy.deepcopy(model))
    poison(second)
    assert second.import_(path) == 36
    (output,) = second.generate(PROMPTS[3:4], GREEDY)
    assert output.num_cached_tokens == 36
    assert output.num_accepted_tokens == output.num_drafted_tokens > 0
    for other, message in (
        (LLM(model, roomy), "layout"),
        (LLM(model, roomy, draft_model=near(model)), "another model"),
        (LLM(near(model), roomy, draft_model=model), "another model"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            other.import_(path)


def test_a_tier_serves_both_caches(model: PreTrainedModel, tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, "64MiB", loads="always", deadline_s=30.0)
    config = replace(ROOMY, tiers=(tier,), warm_up=False, max_tokens=100)
    prompt = [*range(20, 90)]
    first = LLM(model, config, draft_model=model)
    first.generate([prompt], GREEDY)
    assert first.close()
    second = LLM(model, config, draft_model=model)
    poison(second)
    (output,) = second.generate([prompt], GREEDY)
    assert sum(output.num_loaded_tokens.values()) == 64
    assert output.num_accepted_tokens == output.num_drafted_tokens > 0
    second.close()
    other = LLM(model, config, draft_model=near(model))
    (output,) = other.generate([prompt], GREEDY)
    assert not output.num_loaded_tokens
    other.close()


def test_weights_of_both_models_count_and_shared_ones_once(model: PreTrainedModel) -> None:
    alone = LLM(model, ROOMY).core.memory.weights_nbytes
    other = make_model("llama", num_hidden_layers=1)
    small = LLM(other, ROOMY).core.memory.weights_nbytes
    assert LLM(model, ROOMY, draft_model=other).core.memory.weights_nbytes == alone + small
    assert LLM(model, ROOMY, draft_model=model).core.memory.weights_nbytes == alone


def test_both_models_share_the_bytes_of_the_pools(model: PreTrainedModel) -> None:
    config = replace(ROOMY, num_blocks=None, kv_nbytes=2**20)
    alone, both = LLM(model, config), LLM(model, config, draft_model=make_model("gemma3_text"))
    assert [spec.pool for spec in both.groups.specs] == ["full", "draft:full", "draft:window_12"]
    for llm in (alone, both):
        assert 0.8 * 2**20 < llm.core.executor.storage.device_nbytes <= 2**20
    assert both.core.space.config.blocks_by_pool()["full"] < alone.core.space.config.blocks_by_pool()["full"]


# What cannot be


def test_what_does_not_fit_is_refused_with_a_reason(model: PreTrainedModel) -> None:
    def small(**changes: Any) -> PreTrainedModel:  # noqa: ANN401 - of configs
        return make_model("llama", num_hidden_layers=1, **changes)

    meta = moved(small(), "meta")
    training = small()
    training.train()
    for draft, changes, error, message in (
        (small(vocab_size=198), {}, ConfigurationError, "vocabulary of 198 tokens, and its target one of 199"),
        (small(max_position_embeddings=79), {}, ConfigurationError, "79 positions, and sequences may have 80 tokens"),
        (meta, {}, ConfigurationError, "LlamaForCausalLM is on meta, and LlamaForCausalLM on cpu: move the"),
        (make_model("bamba"), {}, UnsupportedModelError, "the draft model BambaForCausalLM has recurrent layers"),
        (
            make_model("deepseek_v32"),
            {},
            UnsupportedModelError,
            "draft model DeepseekV32ForCausalLM has sparse attention",
        ),
        (training, {}, UnsupportedModelError, "the draft model cannot be used: LlamaForCausalLM is in training mode"),
        (model, {"speculation": PromptLookup()}, ConfigurationError, "a draft model and `speculation` both guess"),
        (model, {"num_draft_tokens": 65}, ConfigurationError, "num_draft_tokens must be at most 64, got 65"),
        (None, {"num_draft_tokens": 2}, ConfigurationError, "num_draft_tokens is 2, and there is no draft model"),
        (model, {"num_blocks": {"full": 50}}, ConfigurationError, "draft:full"),
    ):
        with pytest.raises(error, match=message):
            LLM(model, replace(ROOMY, **changes), draft_model=draft)


def test_a_longer_target_is_drafted_for_up_to_where_the_draft_model_ends(model: PreTrainedModel) -> None:
    draft = make_model("gpt2", n_positions=40, n_layer=1)
    llm = LLM(model, replace(ROOMY, max_tokens=40), draft_model=draft)
    prompt = PROMPTS[3][:30]
    (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=10))
    require_same(output, LLM(model, ROOMY).generate([prompt], replace(GREEDY, max_tokens=10))[0])
    assert output.num_drafted_tokens > 0
