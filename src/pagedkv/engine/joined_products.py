"""Products of compiled layers that read one tensor, computed as one product.

Projections to queries, keys and values read the same tensor, as do a gate and what it opens. On a GPU a step of few
tokens waits for weights, and a small product ends before the memory is busy. On an H200, in bfloat16, microseconds in a
graph for 2 / 64 / 256 tokens:

    =============================  ==================  ==================
    weights                        one by one          as one
    =============================  ==================  ==================
    4,096 + 1,024 + 1,024 x 4,096  28.9 / 29.1 / 38.1  16.5 / 18.2 / 23.4
    12,288 + 12,288 x 4,096        56.9 / 58.2 / 78.4  49.8 / 53.1 / 77.1
    =============================  ==================  ==================

Which products these are is seen in a pass: linear modules of a layer that are called with the same tensor. Their
weights become views of one tensor::

    q_proj.weight | k_proj.weight | v_proj.weight      each stays the module's parameter: changes in place are seen

In the code that torch has traced of a layer, products with such weights become one operator. It looks each time whether
the weights still lie so, since a model's owner may replace them and other layers run the same code; else it computes
them one by one. Weights that other parameters share, modules of other classes than torch's own (quantised), and what an
adapter holds are left alone.

The library may sum a product of more columns in another order, so its bits may differ from those of several.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import linear

__all__ = ["compute_as_one", "joining_products"]

PRODUCT: Final = torch._C._nn.linear  # noqa: SLF001 - what torch.nn.functional.linear is in traced code
ALIGNED: Final = 16
"""Bytes at whose multiples tensors begin, for compiled code to take them as they are."""
Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
Calls = list[tuple[str, nn.Linear, torch.Tensor]]


@contextmanager
def joining_products(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[list[str]]:
    """Watch a pass that is not compiled, then join the weights of products that read one tensor of a layer.

    Args:
        model: the model; layers: its layers.

    Yields:
        A list that gets, when the pass is over, a text for each kind of product: which weights are one, or why not.

    Cost: memory for another copy of the largest set of weights, while that is joined.
    """
    calls: list[Calls] = [[] for _ in layers]
    hooks = [
        module.register_forward_pre_hook(partial(_note, seen, name))
        for layer, seen in zip(layers, calls, strict=True)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    told: list[str] = []
    try:
        yield told
    finally:
        for hook in hooks:
            hook.remove()
    tensors = [*model.parameters(), *model.buffers()]
    num_holders = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
    texts: dict[str, None] = {}
    for layer, seen in zip(layers, calls, strict=True):
        for names, modules in _with_one_tensor(seen):
            obstacle = _obstacle(layer, names, modules, num_holders)
            if obstacle is None:
                for parts in _parts_of(modules):
                    _join(parts)
            weights = ", ".join(name.rpartition(".")[2] for name in names)
            texts[f"{weights} are {'one product' if obstacle is None else f'apart: {obstacle}'}"] = None
    told.extend(texts)


def _note(seen: Calls, name: str, module: nn.Linear, given: tuple[torch.Tensor]) -> None:
    seen.append((name, module, given[0]))


def _with_one_tensor(seen: Calls) -> list[tuple[list[str], list[nn.Linear]]]:
    """Return the modules that were called with one tensor, and their names, in their order, where there are several."""
    readers: dict[int, tuple[list[str], list[nn.Linear]]] = {}
    for name, module, given in seen:  # which keeps the tensors, so that no other has the number of one
        names, modules = readers.setdefault(id(given), ([], []))
        names.append(name)
        modules.append(module)
    return [each for each in readers.values() if len(each[0]) > 1]


def _obstacle(
    layer: nn.Module, names: Sequence[str], modules: Sequence[nn.Linear], num_holders: Counter[int]
) -> str | None:
    """Return why weights cannot be joined; None if they are alike, lie alone, and are only their modules'."""
    for name, module in zip(names, modules, strict=True):
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or module.weight.is_inference():
            return f"{name} is no plain linear layer ({type(module).__name__} of {type(module.weight).__name__})"
        above = name.split(".")[:-1]
        if any(hasattr(layer.get_submodule(".".join(above[: end + 1])), "base_layer") for end in range(len(above))):
            return f"an adapter holds {name}"
    for alike in _parts_of(modules):
        if len(alike) < len(modules) or len({(part.dtype, part.device, part.shape[1:]) for part in alike}) > 1:
            return "they differ in width, type or biases"
        if any(num_holders[part.untyped_storage().data_ptr()] > 1 for part in alike) and _as_one(alike) is None:
            return "another parameter shares their memory"
        if any(part.nbytes % ALIGNED or not part.is_contiguous() for part in alike):
            return f"they are not contiguous, or no multiples of {ALIGNED} bytes"
    return None


def _parts_of(modules: Sequence[nn.Linear]) -> list[list[torch.Tensor]]:
    """Return the weights of modules, and the biases if there are any."""
    weights: list[torch.Tensor] = [module.weight for module in modules]
    biases: list[torch.Tensor] = [module.bias for module in modules if module.bias is not None]
    return [weights, biases] if biases else [weights]


def _join(parts: Sequence[torch.Tensor]) -> None:
    """Let parameters be views of one tensor, if they are not. They stay the same objects."""
    if _as_one(parts) is not None:
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
        part.data = view


def _as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors that lie one behind the other in one storage as one; None if they do not."""
    storages = {part.untyped_storage().data_ptr() for part in parts}
    follows = all(second.data_ptr() == first.data_ptr() + first.nbytes for first, second in pairwise(parts))
    if len(storages) > 1 or not follows or not all(part.is_contiguous() for part in parts):
        return None
    return parts[0].as_strided((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].stride())


@torch.library.custom_op("pagedkv::products", mutates_args=())
def _products(given: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    """Multiply one tensor by several weights: ``[.., width]`` -> ``[.., sum of their outputs]``."""
    weight, bias = _as_one(weights), _as_one(biases) if biases else None
    if weight is not None and (bias is not None or not biases):
        return linear(given, weight, bias)
    parts = zip(weights, biases, strict=True) if biases else ((part,) for part in weights)
    return torch.cat([linear(given, *part) for part in parts], dim=-1)


@_products.register_fake
def _(given: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    del biases
    return given.new_empty(*given.shape[:-1], sum(weight.shape[0] for weight in weights))


def compute_as_one(backend: Backend, traced: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """Compile the traced code of a layer, as a back end of torch.compile, with joined products as one.

    Args:
        backend: compiles what comes of it.
        traced: the code; given: its arguments, tensors of one of the layers that run it.
    """
    inputs = dict(zip(traced.graph.find_nodes(op="placeholder"), given, strict=True))
    readers: dict[object, list[torch.fx.Node]] = {}
    for node in traced.graph.find_nodes(op="call_function", target=PRODUCT):
        readers.setdefault(node.args[0], []).append(node)
    for products in readers.values():
        found = [inputs.get(product.args[1]) for product in products]
        weights = [part for part in found if type(part) is nn.Parameter]
        if 1 < len(weights) == len(products) and _as_one(weights) is not None:
            _replace(traced.graph, products, [part.shape[0] for part in weights])
    traced.recompile()
    return backend(traced, given)


def _replace(graph: torch.fx.Graph, products: Sequence[torch.fx.Node], widths: Sequence[int]) -> None:
    """Replace products by one operator and its parts."""
    weights = [product.args[1] for product in products]
    biases = [bias for product in products for bias in product.args[2:] if bias is not None]
    with graph.inserting_before(products[0]):
        whole = graph.call_function(torch.ops.pagedkv.products.default, (products[0].args[0], weights, biases))
        start = 0
        for product, width in zip(products, widths, strict=True):
            product.replace_all_uses_with(graph.call_function(torch.narrow, (whole, -1, start, width)))
            start += width
    for product in products:
        graph.erase_node(product)
