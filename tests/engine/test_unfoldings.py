"""Families with latents: absorbed attention answers as unfolded attention does, layer by layer, over blocks."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from pagedkv.attention import AttentionBackend, GroupMetadata, StepMetadata, backend_for
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.device import KVStorage, Transfers
from pagedkv.engine import LLM, EngineConfig, PromptLookup, SamplingParams
from pagedkv.engine.forward_pass import ForwardPass
from pagedkv.engine.unfoldings import AbsorbedLatents, Unfoldings, read_unfoldings
from pagedkv.errors import UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.compat import IMPLEMENTATION, BorrowedModel, listening
from pagedkv.probe.layers import EngineGroups, group_layers
from pagedkv.probe.probing import probe
from tests.choosing import long_but
from tests.engine.families import CONFIGS, MORE, SPARSE, make_model, moved
from tests.engine.family_matrix.tiny import NotMadeError, make_tiny
from tests.engine.serving import CONFIG, PROMPTS, compare, poison, reference, reference_of, serve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "longcat_flash",
    "minicpm3",
    "youtu",
)
SELECTING = [name for name in SPARSE if name != "qwen4_exp_text"]
BLOCK_SIZE, NUM_BLOCKS, LENGTH, NUM_PROMPT = 4, 12, 19, 17
TOLERANCE = 2e-5


class Absorbing:
    """A pass of the engine over blocks that computes each layer twice."""

    def __init__(
        self, forward_pass: ForwardPass, groups: EngineGroups, backend: AttentionBackend, found: Unfoldings
    ) -> None:
        self.pass_, self.groups, self.backend, self.found = forward_pass, groups, backend, found
        self.differences: list[float] = []
        self.layers = {number: layer_idx for layer_idx, number in groups.writers.items()}

    def attend(self, *given: Any) -> torch.Tensor:  # noqa: ANN401 - as a pass is called
        """Answer as the pass does, and note how far the absorbed answer is from it."""
        number = len(self.differences)
        unfolded = self.pass_.attend(*given)
        query = given[1].transpose(1, 2).flatten(0, 1)
        absorbed = self.found.by_layer[self.layers[number]].attend(self.backend, number, query, self.pass_._step)
        spread = unfolded.std().clamp(min=1e-6)
        self.differences.append(float((absorbed.view_as(unfolded) - unfolded).abs().max() / spread))
        return unfolded

    def make_mask(self, options: dict[str, Any]) -> None:
        """Make none."""


def answer(
    forward_pass: ForwardPass, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer an update of a cache by the pass."""
    return forward_pass.update(layer_idx, key, value)


def step_of(groups: EngineGroups, start: int, stop: int) -> StepMetadata:
    """One sequence in shuffled blocks."""
    table = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1
    positions = torch.arange(start, stop)
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    numbers = [torch.tensor(each).int() for each in ([start], [stop], [0, stop - start])]
    arrays = (table[None].int(), *numbers, slots)
    group = GroupMetadata(*(array.to(DEVICE) for array in arrays))
    return StepMetadata((group,) * len(groups.specs), 1, stop - start)


def differences(model: PreTrainedModel) -> list[float]:
    """Compute a prompt and two tokens; return for each layer how far absorbed answers are from unfolded ones."""
    groups = group_layers(probe(model), BLOCK_SIZE, 8)
    found = read_unfoldings(model, groups.latents)
    assert set(found.by_layer) == set(groups.latents), found.reasons
    (latent_dim,) = {each.num_value_dims for each in found.by_layer.values()}
    config = SpaceConfig(groups.specs, {spec.pool: NUM_BLOCKS for spec in groups.specs})
    storage = KVStorage(config, groups.shapes, DEVICE)
    for pool in storage.pools.values():
        pool.device_bytes.fill_(255)
    backend = backend_for(
        storage,
        groups.attention,
        max_places=1,
        max_tokens=LENGTH,
        max_length=LENGTH,
        query_dtype=model.dtype,
        latent_dim=latent_dim,
    )
    tokens = torch.randint(3, 190, (LENGTH,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found_all = []
    for start, stop in ((0, NUM_PROMPT), (NUM_PROMPT, NUM_PROMPT + 1), (NUM_PROMPT + 1, LENGTH)):
        where = torch.arange(start, stop, device=DEVICE)[None]
        forward_pass = ForwardPass(groups, backend, Transfers(storage), step_of(groups, start, stop), where)
        listener, cache = Absorbing(forward_pass, groups, backend, found), compat.dense_cache(model)
        cast("Any", cache).update = partial(answer, forward_pass)
        with torch.inference_mode(), BorrowedModel(model).calling(IMPLEMENTATION), listening(listener):
            compat.forward(
                model,
                torch.tensor([0], device=DEVICE),
                cache,
                input_ids=tokens[None, start:stop],
                position_ids=where,
            )
        found_all += listener.differences
    return found_all


def with_latents(name: str) -> PreTrainedModel:
    """Make a model of a family that keeps latents, or skip the test."""
    try:
        model = make_model(name) if name in CONFIGS or name in MORE else make_tiny(name)
    except (NotMadeError, ValueError) as problem:  # a version of transformers without it
        pytest.skip(str(problem))
    if not probe(model).sources[0].is_latent:
        pytest.skip("this transformers keeps unfolded keys")
    return moved(model, DEVICE)


@pytest.mark.parametrize("name", FAMILIES)
def test_absorbed_answers_are_the_unfolded_ones(name: str) -> None:
    found = differences(with_latents(name))
    assert len(found) >= 3
    assert max(found) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "preemption"),
    long_but([("deepseek_v3", "swap"), *product(FAMILIES, ["recompute"])], product(FAMILIES, ["recompute", "swap"])),
)
def test_an_engine_that_absorbs_latents_answers_as_the_model_does(name: str, preemption: str) -> None:
    """With shared prefixes, chunks, preemption, and NaN in every block that has no content."""
    model = with_latents(name)
    config = replace(CONFIG, absorb_latents=True, num_blocks=28, self_test=True)
    if preemption == "swap":
        config = replace(config, preemption="swap", num_host_blocks=40, min_partial_hit=1)
    llm = LLM(model, config)
    assert llm.core.absorbed.latent_dim > 0
    poison(llm)
    requests, records = serve(llm)
    compare(requests, reference(model, PROMPTS))
    assert sum(record.num_hit_tokens for record in records) > 0
    assert llm.core.space.num_live_blocks() == 0


def unfold_otherwise(model: PreTrainedModel, layer: int) -> None:
    """Put a norm between a layer's latents and the matrices."""
    attention = cast("Any", model).model.layers[layer].self_attn
    expand = attention.expand_kv
    attention.expand_kv = lambda first, second: expand(first / first.norm(dim=-1, keepdim=True).clamp(min=1.0), second)


def test_a_layer_that_is_no_matrix_is_unfolded_beside_others_that_are() -> None:
    model = with_latents("deepseek_v3")
    unfold_otherwise(model, 1)
    llm = LLM(model, replace(CONFIG, absorb_latents=True, self_test=True))
    assert sorted(llm.core.absorbed.by_layer) == [0, 2]
    assert "not a linear function" in llm.core.absorbed.reasons[1]
    poison(llm)
    requests, _ = serve(llm)
    compare(requests, reference(model, PROMPTS))


def add_noise(model: PreTrainedModel) -> None:
    """Change all weights of a model in place."""
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=random) * 0.05).to(DEVICE))


def test_new_weights_are_absorbed_from_their_epoch_on() -> None:
    model = with_latents("deepseek_v3")
    llm = LLM(model, replace(CONFIG, absorb_latents=True))
    places = [each.keys.data_ptr() for each in llm.core.absorbed.by_layer.values()]
    before, _ = serve(llm)
    llm.set_weights_epoch("second", change=lambda: add_noise(model))
    after, _ = serve(llm)
    compare(after, reference(model, PROMPTS))
    assert [each.output().token_ids for each in after] != [each.output().token_ids for each in before]
    assert [each.keys.data_ptr() for each in llm.core.absorbed.by_layer.values()] == places


def test_other_matrices_would_answer_otherwise() -> None:
    """Negative control: an engine uses the matrices that it read."""
    model = with_latents("deepseek_v3")
    llm = LLM(model, replace(CONFIG, absorb_latents=True))
    with torch.inference_mode():
        for each in llm.core.absorbed.by_layer.values():
            each.values.neg_()
    answers, _ = serve(llm)
    with pytest.raises(AssertionError):
        compare(answers, reference(model, PROMPTS))


def test_layers_that_unfold_otherwise_are_refused_and_no_matrix_is_replaced() -> None:
    model = with_latents("deepseek_v3")
    absorbed = AbsorbedLatents(model, group_layers(probe(model), BLOCK_SIZE, 8).latents)
    before = {layer_idx: each.keys.clone() for layer_idx, each in absorbed.by_layer.items()}
    unfold_otherwise(model, 2)
    add_noise(model)
    with pytest.raises(UnsupportedModelError, match="layer 2 unfolds its latents otherwise"):
        absorbed.read_again()
    for layer_idx, each in absorbed.by_layer.items():
        assert torch.equal(each.keys, before[layer_idx])


def test_latents_are_absorbed_on_a_gpu_if_nothing_else_is_configured() -> None:
    chosen = [
        LLM(with_latents("deepseek_v3"), EngineConfig(num_blocks=20, absorb_latents=wish)).core.absorbed
        for wish in (None, False)
    ]
    assert bool(chosen[0].by_layer) == (DEVICE == "cuda")
    assert chosen[1].by_layer == {}
    assert LLM(make_model("llama"), EngineConfig(num_blocks=20, absorb_latents=True)).core.absorbed.by_layer == {}


@pytest.mark.skipif(DEVICE == "cpu", reason="there are no graphs on a CPU")
def test_steps_with_absorbed_latents_are_captured() -> None:
    config = EngineConfig(num_blocks=200, block_size=4, max_sequences=8, overlap=False)
    model, params = with_latents("youtu"), SamplingParams(max_tokens=30, ignore_eos=True)
    answers = []
    for each in (config, replace(config, capture_steps=False)):
        llm = LLM(model, each)
        answers.append([answer.token_ids for answer in llm.generate([list(prompt) for prompt in PROMPTS], params)])
        if each.capture_steps:
            assert llm.core.capture_state.refusal is None
            assert llm.core.capture_state.num_graphs >= 1  # of decoding; each size of chunks comes once
    assert answers[0] == answers[1]


def test_weights_of_another_epoch_are_read_again() -> None:
    model = moved(make_model("deepseek_v3"), DEVICE)
    groups = group_layers(probe(model), BLOCK_SIZE, 8)
    before = read_unfoldings(model, groups.latents).by_layer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after = read_unfoldings(model, groups.latents).by_layer
    for layer_idx, unfolding in before.items():
        torch.testing.assert_close(after[layer_idx].values, 1.5 * unfolding.values)


def test_a_norm_behind_the_cache_is_told() -> None:
    """Negative control: such a layer is left to the model."""
    model = moved(make_model("deepseek_v3"), DEVICE)
    groups = group_layers(probe(model), BLOCK_SIZE, 8)
    attention = cast("Any", model).model.layers[1].self_attn
    expand = attention.expand_kv
    attention.expand_kv = lambda first, second: expand(first / first.norm(dim=-1, keepdim=True).clamp(min=1.0), second)
    found = read_unfoldings(model, groups.latents)
    assert found.reasons == {1: "its keys are not a linear function of latents"}
    assert sorted(found.by_layer) == [0, 2]


def test_a_model_that_fails_is_left_as_it_is() -> None:
    model = moved(make_model("deepseek_v3"), DEVICE)
    groups = group_layers(probe(model), BLOCK_SIZE, 8)

    def fail(*_: object) -> None:
        raise ValueError("no latents but two")

    cast("Any", model).model.layers[1].self_attn.expand_kv = fail
    found = read_unfoldings(model, groups.latents)
    assert sorted(found.by_layer) == [0]
    assert found.reasons == dict.fromkeys([1, 2], "the pass failed: ValueError: no latents but two")


def test_without_latents_there_is_nothing_to_read() -> None:
    found = read_unfoldings(make_model("llama"), {})
    assert not found.by_layer
    assert not found.reasons


@pytest.mark.parametrize("name", long_but(("deepseek_v32", "dots3_note_text", "hy_v4"), SELECTING))
def test_selected_latents_are_attended_to_without_unfolding_them(name: str) -> None:
    model, references = make_model(name), reference_of(name)
    if Version(transformers.__version__) < Version("5.23") and not group_layers(probe(model), BLOCK_SIZE, 8).latents:
        pytest.skip(f"the class of transformers {transformers.__version__} unfolds latents before they are cached")
    config = replace(CONFIG, absorb_latents=True, self_test=True)
    for each in (config, replace(config, preemption="swap", num_host_blocks=40, speculation=PromptLookup())):
        llm = LLM(model, each)
        assert sorted(llm.core._parts.absorbed.by_layer) == [0, 1, 2], llm.core._parts.absorbed.reasons
        poison(llm)
        compare(serve(llm)[0], references)
