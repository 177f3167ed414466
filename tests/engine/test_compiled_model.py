"""A compiled model answers over blocks as it does dense, by graphs or call by call.

On a CPU the compiled code is run by torch itself (``aot_eager``): what is traced and handed to the operator is the
same. On a GPU it is what Inductor makes.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from pagedkv.engine import LLM, EngineConfig, PromptLookup, SamplingParams
from pagedkv.engine.compiled_model import CompiledModel
from pagedkv.engine.parts import chosen_for
from pagedkv.errors import UnsupportedModelError
from pagedkv.probe.layers import EngineGroups
from tests.choosing import long_but
from tests.engine.families import make_model, moved
from tests.engine.guesses import guess
from tests.engine.serving import CONFIG, PROMPTS, compare, poison, reference, reference_of, serve
from tests.engine.test_captured_passes import DEVICE, Again, replay_on_cpu
from tests.engine.test_families import NUM_BLOCKS

COMPILED = replace(CONFIG, compile_model=True)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def compiled_llm(name: str, config: EngineConfig = COMPILED, *, is_captured: bool = True) -> LLM:
    """Build an engine whose model is compiled, and captured or not."""
    model = moved(make_model(name), DEVICE)
    if DEVICE == "cuda":
        return LLM(model, replace(config, capture_steps=is_captured))
    llm = LLM(model, replace(config, compile_model=False, capture_steps=False))
    llm.core._parts.runner._compiled = CompiledModel(model, llm.groups, "aot_eager")
    if is_captured:
        replay_on_cpu(llm, Again, min_tokens=2)
    else:
        llm.core._parts.runner.prepare(config.max_sequences)
    return llm


CASES = [("llama", True), ("llama", False), ("mistral", True), ("gemma2", True)]


@pytest.mark.parametrize(("name", "is_captured"), long_but([("llama", False), ("gemma2", True)], CASES))
def test_a_family_answers_as_it_does_dense(name: str, is_captured: bool) -> None:  # noqa: FBT001 - a parameter
    llm = compiled_llm(name, replace(COMPILED, num_blocks=NUM_BLOCKS.get(name, 28)), is_captured=is_captured)
    poison(llm)
    requests, records = serve(llm)
    compare(requests, reference_of(name, device=DEVICE))
    assert sum(record.num_recomputed for record in records) > 0
    assert (llm.core.capture_state.num_graphs > 0) == is_captured
    if is_captured:
        assert llm.core.capture_state.refusal is None


@pytest.mark.parametrize("name", long_but(["gemma2"], ["llama", "gemma2"]))
def test_layers_and_numbers_of_tokens_share_one_version_of_the_code(name: str) -> None:
    """A second version would answer otherwise by rounding than the graphs that were captured of the first."""
    counter = CompileCounterWithBackend("aot_eager")
    model = moved(make_model(name), DEVICE)
    llm = LLM(model, replace(COMPILED, compile_model=False, capture_steps=False, num_blocks=80))
    llm.core._parts.runner._compiled = CompiledModel(model, llm.groups, counter)
    replay_on_cpu(llm, Again, min_tokens=2)
    assert counter.frame_count == 1
    serve(llm)
    assert counter.frame_count == 1


def test_a_model_without_lists_of_layers_is_refused() -> None:
    model = make_model("llama")
    llm = LLM(model, replace(COMPILED, compile_model=False, capture_steps=False, num_blocks=80))
    for layer in model.model.layers:
        layer.forward = layer.forward  # an attribute of the object, as wrappers of others set it
    with pytest.raises(UnsupportedModelError, match="cannot be compiled: layer 0 is no module of a list"):
        CompiledModel(model, llm.groups)


def test_drafts_and_scores_of_prompts() -> None:
    llm = compiled_llm("llama", replace(COMPILED, num_blocks=80, speculation=PromptLookup()))
    references = reference_of("llama", device=DEVICE)
    poison(llm)
    requests, records = serve(
        llm, greet=lambda request: guess(request, references[request.number].token_ids, wrong_every=3)
    )
    compare(requests, references)
    assert sum(record.num_accepted for record in records) > 0
    scored = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert scored[0].prompt_logprobs


def test_by_default_a_gpu_compiles_and_overlaps_and_a_cpu_does_neither() -> None:
    model = moved(make_model("llama"), DEVICE)
    llm = LLM(model, replace(CONFIG, compile_model=None, overlap=None))
    is_chosen = DEVICE == "cuda"
    assert (llm.core.config.compile_model, llm.core.config.overlap) == (is_chosen, is_chosen)
    if is_chosen:
        assert llm.core.choices == (
            "the model is compiled; steps overlap; q_proj, k_proj, v_proj are one product; gate_proj, up_proj are one "
            "product"
        )
    else:
        why = "(the model is on cpu)"
        assert llm.core.choices == f"the model is not compiled {why}; steps do not overlap {why}"
    requests, _ = serve(llm)
    compare(requests, reference_of("llama", device=DEVICE))


def test_what_is_chosen_where() -> None:
    llama, latents = (LLM(make_model(name), replace(CONFIG, num_blocks=80)).groups for name in ("llama", "deepseek_v3"))
    gpu, left_open = torch.device("cuda"), replace(CONFIG, compile_model=None, overlap=None)

    def chosen(config: EngineConfig, groups: EngineGroups = llama) -> tuple[bool | None, ...]:
        found = chosen_for(config, groups, gpu).config
        return found.compile_model, found.overlap

    assert chosen(left_open) == (True, True)
    assert chosen(left_open, latents) == (False, True)
    assert chosen(replace(left_open, num_draft_tokens=4)) == (True, False)
    assert chosen(replace(left_open, compile_model=False)) == (False, True)
    assert chosen(replace(left_open, overlap=False)) == (True, False)
    told = chosen_for(left_open, latents, gpu).told
    assert told.startswith("the model is not compiled (it keeps latents, ")
    assert told.endswith("; steps overlap")


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled by default on a CPU")
def test_where_compiling_fails_and_was_not_asked_for_the_engine_goes_on_without() -> None:
    model = moved(make_model("llama"), DEVICE)
    for layer in model.model.layers:
        layer.forward = layer.forward  # an attribute of the object, as wrappers of others set it
    llm = LLM(model, replace(CONFIG, compile_model=None))
    assert not llm.core.config.compile_model
    assert "not compiled after all: LlamaForCausalLM cannot be compiled: layer 0" in llm.core.choices
    requests, _ = serve(llm)
    compare(requests, reference(model, PROMPTS))
    assert llm.core.capture_state.num_graphs > 0


def test_its_weights_may_change() -> None:
    llm = compiled_llm("llama", replace(COMPILED, num_blocks=80))
    serve(llm)
    model = llm.core._parts.runner._model

    def change() -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0).clone())

    llm.set_weights_epoch("2", change=partial(change))
    requests, _ = serve(llm)
    compare(requests, reference(model, PROMPTS))


def test_the_model_itself_is_as_it_was() -> None:
    llm = compiled_llm("llama", replace(COMPILED, num_blocks=80))
    model = llm.core._parts.runner._model
    expected = reference_of("llama", device=DEVICE)
    serve(llm)
    assert [each.token_ids for each in reference(model, PROMPTS)] == [each.token_ids for each in expected]


@pytest.mark.parametrize(("name", "why"), [("falcon_h1", "recurrent layers"), ("deepseek_v3", "latents")])
def test_what_cannot_be_compiled_is_refused(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"cannot be compiled: .*{why}.*Leave compile_model off"):
        LLM(make_model(name), replace(COMPILED, num_blocks=80))
