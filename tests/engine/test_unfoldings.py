"""Families with latents: absorbed attention answers as unfolded attention does, layer by layer, over blocks."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.memory.attention import AttentionBackend, GroupMetadata, StepMetadata, backend_for
from pagedkv.memory.contract.space_config import SpaceConfig
from pagedkv.memory.device import KVStorage, Transfers
from pagedkv.serving.engine import compat
from pagedkv.serving.engine.borrowing import BorrowedModel
from pagedkv.serving.engine.current_pass import IMPLEMENTATION, listening
from pagedkv.serving.engine.forward_pass import ForwardPass
from pagedkv.serving.engine.grouping import EngineGroups, group_layers
from pagedkv.serving.engine.probe import probe
from pagedkv.serving.engine.unfoldings import Unfoldings, read_unfoldings
from tests.engine.families import CONFIGS, MORE, make_model, moved
from tests.engine.family_matrix.tiny import NotMadeError, make_tiny

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
BLOCK_SIZE, NUM_BLOCKS, LENGTH, NUM_PROMPT = 4, 12, 19, 17
TOLERANCE = 2e-5


class Absorbing:
    """A pass of the engine over blocks that asks each layer twice."""

    def __init__(
        self, forward_pass: ForwardPass, groups: EngineGroups, backend: AttentionBackend, found: Unfoldings
    ) -> None:
        self.pass_, self.groups, self.backend, self.found = forward_pass, groups, backend, found
        self.differences: list[float] = []
        self.layers = {number: layer_idx for layer_idx, number in groups.writers.items()}

    def attend(self, *given: Any) -> torch.Tensor:  # noqa: ANN401 - as a pass is asked
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
    """Compute a prompt and two tokens; tell for each layer how far absorbed answers are from unfolded ones."""
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
    told = []
    for start, stop in ((0, NUM_PROMPT), (NUM_PROMPT, NUM_PROMPT + 1), (NUM_PROMPT + 1, LENGTH)):
        where = torch.arange(start, stop, device=DEVICE)[None]
        forward_pass = ForwardPass(groups, backend, Transfers(storage), step_of(groups, start, stop), where)
        listener, cache = Absorbing(forward_pass, groups, backend, found), compat.dense_cache(model)
        cast("Any", cache).update = partial(answer, forward_pass)
        with torch.inference_mode(), BorrowedModel(model).calling(IMPLEMENTATION), listening(listener):
            compat.forward(
                model,
                torch.tensor([0], device=DEVICE),
                input_ids=tokens[None, start:stop],
                position_ids=where,
                past_key_values=cache,
            )
        told += listener.differences
    return told


@pytest.mark.parametrize("name", FAMILIES)
def test_absorbed_answers_are_the_unfolded_ones(name: str) -> None:
    try:
        model = make_model(name) if name in CONFIGS or name in MORE else make_tiny(name)
    except (NotMadeError, ValueError) as problem:  # a transformers that does not know it
        pytest.skip(str(problem))
    if not probe(model).sources[0].is_latent:
        pytest.skip("this transformers keeps unfolded keys")
    told = differences(moved(model, DEVICE))
    assert len(told) >= 3
    assert max(told) < TOLERANCE


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
