"""A model is watched for whatever makes a graph of it useless."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from pagedkv.engine.captured_passes import ModelWatch
from tests.engine.families import make_model


def moved_weight(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def exchanged_weight(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(model.model.layers[1].mlp.up_proj.weight.data)


def lost_weight(model: PreTrainedModel) -> None:
    del model.model.layers[0].mlp.up_proj.weight


def converted(model: PreTrainedModel) -> None:
    nn.Module.to(model, torch.bfloat16)


def moved_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


def exchanged_module(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.Identity()


def another_layer(model: PreTrainedModel) -> None:
    model.model.layers[0] = model.model.layers[1]


def trained(model: PreTrainedModel) -> None:
    model.train()


def hooked(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        moved_weight,
        exchanged_weight,
        lost_weight,
        converted,
        moved_buffer,
        exchanged_module,
        another_layer,
        trained,
        hooked,
    ],
)
def test_it_notices(change: Callable[[PreTrainedModel], None]) -> None:
    model = make_model("llama")
    watch = ModelWatch(model)
    assert not watch.has_changed()
    change(model)
    assert watch.has_changed()


def test_it_lets_pass_what_a_graph_does_as_well() -> None:
    model, other = make_model("llama"), make_model("llama")
    watch = ModelWatch(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    other.lm_head.register_forward_hook(lambda *_: None)
    assert not watch.has_changed()
    assert ModelWatch(other).has_hooks
    assert not watch.has_hooks


def test_it_notices_that_hooks_are_gone() -> None:
    model = make_model("llama")
    hooks = [model.model.layers[each].register_forward_hook(lambda *_: None) for each in range(2)]
    watch = ModelWatch(model)
    hooks[0].remove()
    assert not watch.has_changed()
    hooks[1].remove()
    assert watch.has_changed()


def test_it_notices_which_adapter_is_active() -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._active_adapter = ["first"]
            self._disable_adapters = False

    model = make_model("llama")
    model.model.layers[0].mlp.up_proj = Adapted()
    watch = ModelWatch(model)
    assert not watch.has_changed()
    model.model.layers[0].mlp.up_proj._active_adapter = ["second"]
    assert watch.has_changed()


def test_weights_stay_allocated_until_it_goes() -> None:
    model = make_model("llama")
    watch = ModelWatch(model)
    before = model.lm_head.weight.data_ptr()
    model.lm_head.weight.data = torch.zeros(1)
    assert before in {weight.data_ptr() for weight in watch._kept}
