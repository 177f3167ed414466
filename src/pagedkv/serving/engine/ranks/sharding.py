"""Shares a model out to ranks, by the plan that transformers has for it (``base_model_tp_plan`` of its configuration).

Of a plan's styles two cut weights: ``colwise``, along what a linear layer gives, so that each rank computes some heads
or some of a feed-forward layer, and ``rowwise``, along what it takes, whose results all ranks add up. Modules of every
other style are whole on each rank, as are embeddings, the head and experts: so answers are right for every model that
has a plan, and memory is saved where most of it is. (Tensor parallelism as of Megatron-LM, arXiv:1909.08053.)
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
from torch import nn

from pagedkv.memory.contract.errors import UnsupportedModelError
from pagedkv.memory.contract.head_slices import heads_of_rank
from pagedkv.serving.engine import compat

__all__ = ["shard"]

KEY_VALUE: Final = ("k_proj", "v_proj")
AddUp = Callable[[torch.Tensor], object]


def shard(model: compat.Model, rank: int, num_ranks: int, add_up: AddUp) -> None:
    """Keep a rank's part of a model, in place.

    Args:
        model: the whole model, in evaluation mode.
        rank, num_ranks: which part.
        add_up: adds a tensor up over all ranks, in place.

    Raises:
        UnsupportedModelError: transformers has no plan for it, or its heads or layers cannot be cut into so many parts.
    """
    plan = compat.tensor_parallel_plan(model)
    if not plan:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no base_model_tp_plan in its configuration, by which it could be shared out "
            f"to {num_ranks} ranks: serve it with one"
        )
    modules = dict(cast("nn.Module", model).named_modules())
    cut = [
        (name, modules[name], style)
        for pattern, style in plan.items()
        for name in _matching(pattern, modules)
        if isinstance(modules[name], nn.Linear)
    ]
    for name, module, style in cut:
        if style == "colwise":
            parent = modules[name.rpartition(".")[0]]
            _cut_outputs(name, cast("nn.Linear", module), parent, rank, num_ranks)
        elif style == "rowwise":
            _cut_inputs(name, cast("nn.Linear", module), rank, num_ranks, add_up)
    _count_heads(modules)


def _matching(pattern: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the modules that a plan's pattern means; ``*`` is the number of a layer."""
    expression = re.compile(r"(.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+"))
    return (name for name in modules if expression.fullmatch(name))


def _cut_outputs(name: str, linear: nn.Linear, parent: nn.Module, rank: int, num_ranks: int) -> None:
    """Keep some of what a linear layer gives: whole heads where it gives heads, which may be repeated."""
    head_dim = getattr(parent, "head_dim", None)
    if name.endswith(KEY_VALUE) and isinstance(head_dim, int):
        heads = heads_of_rank(linear.out_features // head_dim, num_ranks, rank)
        part = slice(heads.first * head_dim, (heads.first + heads.count) * head_dim)
    else:
        part = _part(name, "outputs", linear.out_features, rank, num_ranks)
    linear.weight = nn.Parameter(linear.weight.data[part].clone(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.data[part].clone(), requires_grad=False)
    linear.out_features = part.stop - part.start


def _cut_inputs(name: str, linear: nn.Linear, rank: int, num_ranks: int, add_up: AddUp) -> None:
    """Keep some of what a linear layer takes; the ranks add up what it gives, to which the first adds the bias."""
    part = _part(name, "inputs", linear.in_features, rank, num_ranks)
    linear.weight = nn.Parameter(linear.weight.data[:, part].clone(), requires_grad=False)
    if rank > 0:
        linear.register_parameter("bias", None)
    linear.in_features = part.stop - part.start

    def added_up(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:  # noqa: ANN401, ARG001 - torch's
        add_up(result)
        return result

    linear.register_forward_hook(added_up)


def _part(name: str, what: str, width: int, rank: int, num_ranks: int) -> slice:
    if width % num_ranks:
        raise UnsupportedModelError(f"{name} has {width} {what}, which cannot be cut into {num_ranks} equal parts")
    return slice(rank * width // num_ranks, (rank + 1) * width // num_ranks)


def _count_heads(modules: dict[str, nn.Module]) -> None:
    """Correct how many queries share a key, where key heads were repeated; dense attention reads it."""
    for module in modules.values():
        query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and hasattr(module, "num_key_value_groups"):
            vars(module)["num_key_value_groups"] = query.out_features // key.out_features
