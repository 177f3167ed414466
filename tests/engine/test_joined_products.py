"""Products that read one tensor are one, whatever becomes of their weights later."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend
from transformers import AutoModelForCausalLM

from pagedkv.engine import LLM
from pagedkv.engine.compiled_model import COMPILED as IMPLEMENTATION, CompiledModel
from pagedkv.engine.joined_products import compute_as_one, joining_products
from pagedkv.probe import compat
from tests.choosing import long_but
from tests.engine.families import make_model, moved
from tests.engine.serving import CONFIG, PROMPTS, compare, reference, serve
from tests.engine.test_captured_passes import DEVICE, Again, replay_on_cpu

APART = replace(CONFIG, compile_model=False, capture_steps=False, num_blocks=80)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


class Products:
    """A back end of torch.compile that runs what it is given, and counts the products in it."""

    def __init__(self) -> None:
        self.num_joined: list[int] = []

    def __call__(self, traced: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        """Count, and compile by torch itself."""
        joined = traced.graph.find_nodes(op="call_function", target=torch.ops.pagedkv.products.default)
        self.num_joined.append(len(joined))
        return lookup_backend("aot_eager")(traced, given)


def compiled_llm(model: compat.Model) -> tuple[LLM, Products]:
    """Build an engine of a compiled model with joined products, without oneDNN's, which hides products from torch."""
    llm, products = LLM(model, APART), Products()
    runner = llm.core._parts.runner
    runner._compiled = compiled = CompiledModel(model, llm.groups, products)
    runner.products._forwards.clear()
    with torch.inference_mode(), runner.borrowed.calling(IMPLEMENTATION), compiled.joining_products():
        runner._compute_padding(7, 1)
    assert compiled.joined == ["q_proj, k_proj, v_proj are one product", "gate_proj, up_proj are one product"]
    replay_on_cpu(llm, Again, min_tokens=2)
    return llm, products


@pytest.mark.parametrize("name", long_but(["qwen2"], ["llama", "qwen2", "gemma2"]))
def test_answers_are_those_of_the_dense_model_whose_weights_stay_its_own(name: str, tmp_path: Path) -> None:
    model = moved(make_model(name), DEVICE)
    expected, parameters = reference(model, PROMPTS), dict(model.named_parameters())
    content = {key: value.clone() for key, value in model.state_dict().items()}
    llm, products = compiled_llm(model)
    requests, _ = serve(llm)
    compare(requests, expected)
    assert products.num_joined == [2], "queries, keys and values; gate and up"
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert all(torch.equal(value, content[key]) for key, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value.to(DEVICE), content[key]) for key, value in again.items())


def test_weights_may_change_in_place_or_be_replaced() -> None:
    model = moved(make_model("llama"), DEVICE)
    llm, _ = compiled_llm(model)
    attention = model.model.layers[1].self_attn

    def negate() -> None:
        with torch.no_grad():
            attention.k_proj.weight.neg_()

    def replace_it() -> None:
        attention.v_proj.weight = nn.Parameter(attention.v_proj.weight.flip(0).clone())

    for epoch, change in enumerate((negate, replace_it), start=1):
        llm.set_weights_epoch(str(epoch), change=change)
        requests, _ = serve(llm)
        compare(requests, reference(model, PROMPTS))


class Adapted(nn.Module):
    """A linear layer with an adapter, as PEFT builds it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Compute as without the adapter."""
        return torch.as_tensor(self.base_layer(given))


class Quantised(nn.Linear):
    """Another class."""


class Layer(nn.Module):
    """Products of one tensor, and one of another."""

    def __init__(self, *first: nn.Module) -> None:
        super().__init__()
        self.first = nn.ModuleList(first or [nn.Linear(16, width, bias=False) for width in (8, 16, 8)])
        self.last = nn.Linear(16, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Compute something of all products."""
        total = given.new_zeros(())
        for module in self.first:
            total = total + module(given).sum()
        return torch.as_tensor(self.last(given + total))


def joined(layer: Layer) -> list[str]:
    """Join the products of a layer alone; return what is told."""
    with joining_products(layer, [layer]) as told:
        layer(torch.randn(2, 16))
    return told


def linear(*, bias: bool = False) -> nn.Linear:
    return nn.Linear(16, 8, bias=bias)


def tied() -> list[nn.Module]:
    first, second = linear(), linear()
    second.weight.data = first.weight.data
    return [first, second]


LEFT_ALONE = [
    ([Adapted(linear()), linear()], "base_layer, 1 are apart: an adapter holds first.0.base_layer"),
    ([linear(), Quantised(16, 8, bias=False)], "first.1 is no plain linear layer (Quantised of Parameter)"),
    ([linear(), linear(bias=True)], "they differ in width, type or biases"),
    (tied(), "another parameter shares their memory"),
    ([nn.Linear(16, 3, bias=True), nn.Linear(16, 3, bias=True)], "no multiples of 16 bytes"),
]


@pytest.mark.parametrize(("modules", "why"), LEFT_ALONE)
def test_what_is_left_alone_is_told(modules: list[nn.Module], why: str) -> None:
    layer = Layer(*modules)
    before = [parameter.data_ptr() for parameter in layer.parameters()]
    (told,) = joined(layer)
    assert why in told
    assert [parameter.data_ptr() for parameter in layer.parameters()] == before


def test_a_product_is_one_only_where_the_weights_lie_together() -> None:
    """Two layers run one code; the weights of one were moved."""
    layers = [Layer(), Layer()]
    given = torch.randn(3, 16)
    expected = [layer(given).detach() for layer in layers]
    with joining_products(nn.ModuleList(layers), layers) as told:
        for layer in layers:
            layer(given)
    assert told == ["0, 1, 2 are one product"]
    moved_one = next(layers[1].first[1].parameters())
    moved_one.data = moved_one.data.clone()
    products = Products()

    def run(layer: Layer, tensor: torch.Tensor) -> torch.Tensor:
        return Layer.forward(layer, tensor)

    compiled = torch.compile(run, backend=lambda traced, inputs: compute_as_one(products, traced, inputs))
    with torch.no_grad():
        for layer, answer in zip(layers, expected, strict=True):
            torch.testing.assert_close(compiled(layer, given), answer)
    assert products.num_joined[0] == 1


def test_joining_twice_moves_nothing() -> None:
    layer = Layer()
    joined(layer)
    before = [parameter.data_ptr() for parameter in layer.parameters()]
    assert joined(layer) == ["0, 1, 2 are one product"]
    assert [parameter.data_ptr() for parameter in layer.parameters()] == before
