"""Splits a model over ranks, by the plan in transformers (``base_model_tp_plan`` of the model's configuration).

Two styles of a plan cut weights. ``colwise`` cuts the outputs of a linear layer, so that each rank computes some heads
or some units of a feed-forward layer. ``rowwise`` cuts the inputs, and the ranks sum the results. Modules of all other
styles stay whole on each rank, as do embeddings, the head and experts. So answers are right for every model with a
plan, and most of its weights are split. (Tensor parallelism of Megatron-LM, arXiv:1909.08053.)
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, cast, final

import torch
from torch import nn
from torch.nn import functional

from pagedkv.contract.head_slices import heads_of_rank
from pagedkv.errors import UnsupportedModelError
from pagedkv.probe import compat

KEY_VALUE: Final = ("k_proj", "v_proj")
AddUp = Callable[[torch.Tensor], object]


@final
class _SummedLinear(nn.Linear):
    """A rank's input features of a linear layer (row-parallel). Results are summed over all ranks.

    A module, not a hook of one: passes of modules without hooks are captured as CUDA graphs.
    """

    def __init__(self, name: str, whole: nn.Linear, rank: int, num_ranks: int, add_up: AddUp) -> None:
        part = _part(name, "inputs", whole.in_features, rank, num_ranks)
        super().__init__(part.stop - part.start, whole.out_features, bias=False, device="meta")
        self.kept = part
        self.weight = nn.Parameter(whole.weight.data[:, part].clone(), requires_grad=False)
        self.register_parameter("bias", whole.bias if rank == 0 else None)  # a sum has it once
        self.train(whole.training)
        self._add_up = add_up

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result = functional.linear(given, self.weight, self.bias)
        if torch.compiler.is_compiling():
            torch.ops.pagedkv.add_up(result)  # the same by way of the pass: see compiled_model
        else:
            self._add_up(result)
        return result


@final
class RankPart:
    """Which part of a model's weights one rank has."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[slice, ...]] = {}
        self._left_out: set[str] = set()

    def keep(self, name: str, *kept: slice) -> None:
        """Note that of a weight these rows, or rows and columns, are kept."""
        self._kept[name] = kept

    def leave_out(self, name: str) -> None:
        """Note that another rank has a weight."""
        self._left_out.add(name)

    def of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of whole weights, by name: views."""
        there = weights.keys() - self._left_out
        return {name: whole[self._kept.get(name, ())] for name, whole in weights.items() if name in there}


def shard(model: compat.Model, rank: int, num_ranks: int, add_up: AddUp) -> RankPart:
    """Cut a model down to the part of one rank, in place; return which part that is.

    Args:
        model: the whole model, in evaluation mode.
        rank: the rank; num_ranks: number of ranks.
        add_up: sums a tensor over all ranks, in place.

    Raises:
        UnsupportedModelError: transformers has no plan for the model, or heads or a width cannot be cut into
            ``num_ranks`` equal parts.
    """
    plan = compat.tensor_parallel_plan(model)
    if not plan:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no base_model_tp_plan in its configuration, which is needed to split it over "
            f"{num_ranks} ranks: serve it on one rank"
        )
    modules = dict(cast("nn.Module", model).named_modules())
    cut = [
        (name, modules[name], style)
        for pattern, style in plan.items()
        for name in _matching(pattern, modules)
        if isinstance(modules[name], nn.Linear)
    ]
    kept = RankPart()
    for name, module, style in cut:
        if style == "colwise":
            parent = modules[name.rpartition(".")[0]]
            rows = _cut_outputs(name, cast("nn.Linear", module), parent, rank, num_ranks)
            kept.keep(f"{name}.weight", rows)
            kept.keep(f"{name}.bias", rows)
        elif style == "rowwise":
            parent_name, _, own_name = name.rpartition(".")
            summed = _SummedLinear(name, cast("nn.Linear", module), rank, num_ranks, add_up)
            setattr(modules[parent_name], own_name, summed)
            kept.keep(f"{name}.weight", slice(None), summed.kept)
            if rank:
                kept.leave_out(f"{name}.bias")
    _count_heads(modules)
    return kept


def _matching(pattern: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the modules that match a plan's pattern; ``*`` stands for the number of a layer."""
    expression = re.compile(r"(.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+"))
    return (name for name in modules if expression.fullmatch(name))


def _cut_outputs(name: str, linear: nn.Linear, parent: nn.Module, rank: int, num_ranks: int) -> slice:
    """Keep a rank's outputs of a linear layer, and return which these are.

    Of key and value layers whole heads are kept, some by several ranks.
    """
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
    return part


def _part(name: str, what: str, width: int, rank: int, num_ranks: int) -> slice:
    if width % num_ranks:
        raise UnsupportedModelError(f"{name} has {width} {what}, which cannot be cut into {num_ranks} equal parts")
    return slice(rank * width // num_ranks, (rank + 1) * width // num_ranks)


def _count_heads(modules: dict[str, nn.Module]) -> None:
    """Correct the number of query heads that share a key head, which dense attention reads: key heads may repeat."""
    for module in modules.values():
        query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and hasattr(module, "num_key_value_groups"):
            vars(module)["num_key_value_groups"] = query.out_features // key.out_features
