"""Linear layers computed by oneDNN: the model's own answers, present weights, and a model that is left as it was."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from pagedkv.engine import LLM, SamplingParams
from pagedkv.engine.linear_products import LinearProducts, padded
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, reference

PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


def logits_of(model: PreTrainedModel, num_tokens: int) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.arange(num_tokens)[None] + 3).logits
    return found


@pytest.mark.parametrize("has_room", [True, False], ids=["packed", "in rows"])
@pytest.mark.parametrize("num_tokens", [1, 3, 37, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_model_computes_what_it_computes(
    model: PreTrainedModel, dtype: torch.dtype, tolerance: float, num_tokens: int, *, has_room: bool
) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    products = LinearProducts(model)
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (products.packed_nbytes > 0) == (dtype is torch.float32 or has_bfloat16)
    products.packed_nbytes *= has_room
    expected = logits_of(model, num_tokens)
    with products.in_place():
        found = logits_of(model, num_tokens)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_steps_of_all_sizes_share_few_products() -> None:
    """Each size that oneDNN meets takes memory that it keeps."""
    sizes = {count: padded(count) for count in range(1, 2049)}
    assert len(set(sizes.values())) == 40
    assert all(count <= size < 1.25 * count for count, size in sizes.items())


def test_only_plain_layers_are_replaced_and_only_for_a_while(model: PreTrainedModel) -> None:
    class Doubling(nn.Linear):
        pass

    layer = model.model.layers[0].mlp
    layer.up_proj.__class__ = Doubling
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    with LinearProducts(model).in_place():
        assert "forward" in vars(layer.gate_proj)
        assert "forward" not in vars(layer.up_proj)
    assert {name: vars(module) for name, module in model.named_modules()} == before


def test_hooks_are_called(model: PreTrainedModel) -> None:
    seen: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda _, __, answer: seen.append(answer.shape))
    with LinearProducts(model).in_place():
        logits_of(model, 3)
    assert len(seen) == 1


@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "through data"])
def test_weights_that_change_in_place_are_used_from_their_epoch_on(model: PreTrainedModel, *, is_counted: bool) -> None:
    llm = LLM(model, CONFIG)
    llm.generate(PROMPTS[:2], PARAMS)

    def change() -> None:
        weight = model.lm_head.weight if is_counted else model.lm_head.weight.data
        with torch.no_grad():
            weight.neg_()

    llm.set_weights_epoch("second", change=change)
    answers = llm.generate(PROMPTS[:2], PARAMS)
    expected = reference(model, PROMPTS[:2], 8)
    assert [list(each.completions[0].token_ids) for each in answers] == [each.token_ids for each in expected]
