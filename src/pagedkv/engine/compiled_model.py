"""CompiledModel: a model's decoder layers compiled by torch.compile, attention as one operator that stays as it is.

Layers of one kind run the same compiled code, each with its own weights: compiling takes as long for 32 layers as for
one. What lies around the layers (embedding, rotary factors, last norm, head) is run as it is::

    model      embedding -> layer 0 -> layer 1 -> ... -> norm -> head
    layer      begin_layer(1), then compiled: norm, q, k, v -> cache.update: k, v -> pagedkv::attend(q, k, v) -> ...
    operator                                                       writes k, v into slots, reads blocks

Compiled code must not see what an engine does at each step. The cache hands keys and values through, and the operator
writes them into their slots and attends, for the layer that the pass has begun. The number of a layer is no constant of
the code. The number of tokens is a symbol, so that one version of the code serves all steps; a step of one token would
need another version, and is padded. There must be one version alone: torch takes the version that it used last, and two
versions differ by rounding, so a graph that was captured of the one would differ from calls of the other.

On several ranks, a second operator, ``pagedkv::add_up``, sums the partial results of a layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Final, final

import torch
from torch import nn
from torch._dynamo import lookup_backend

from pagedkv.engine.forward_pass import ForwardPass
from pagedkv.engine.joined_products import compute_as_one, joining_products
from pagedkv.errors import UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.compat import current_pass
from pagedkv.probe.layers import EngineGroups

COMPILED: Final = "pagedkv_compiled"
LEAST_TOKENS: Final = 2
"""Sizes of 0 and 1 are constants to torch.compile, others symbols."""
FIRST_TOKENS: Final = (7, 5, 3)
"""Tokens of the pass that compiles: torch takes equal sizes for one symbol, and no size of a model is one of these."""


@torch.library.custom_op("pagedkv::attend", mutates_args=())
def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Write and attend: ``[rows, heads, tokens, dim]`` each -> ``[rows, tokens, heads, value_dim]``."""
    return _pass().attend_begun(query, key, value, sinks)


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    del key, sinks
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("pagedkv::add_up", mutates_args=("partial",))
def _add_up(partial: torch.Tensor) -> None:
    """Sum a rank's partial result of a layer over all ranks, in place."""
    _pass().add_up(partial)


@_add_up.register_fake
def _(partial: torch.Tensor) -> None:
    del partial


def _attention(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: Any,  # noqa: ANN401 - each model's own
) -> tuple[torch.Tensor, None]:
    del module, attention_mask
    return torch.ops.pagedkv.attend(query, key, value, options.get("s_aux")), None


compat.register(COMPILED, _attention)


def _pass() -> ForwardPass:
    forward_pass = current_pass()
    assert isinstance(forward_pass, ForwardPass), "compiled code runs in passes over blocks alone"
    return forward_pass


class _PassingCache(compat.Cache):
    """A cache that keeps nothing, and answers what it was given."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand keys and values through."""
        del layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Return 0: positions are given. Raises UnsupportedModelError if a layer derives its positions from this."""
        if layer_idx is not None:
            raise UnsupportedModelError("a layer asks the cache for its positions, which differ from row to row")
        return 0


@final
class CompiledModel:
    """An attention-only model whose layers are compiled when they are first called.

    Args:
        model: the model, which others may go on calling as it is.
        groups: its groups, of which :func:`what_prevents_compiling` found no obstacle.
        backend: of torch.compile.

    Attributes:
        joined: which products of one tensor are one, and which are not, and why.

    Raises:
        UnsupportedModelError: a layer that keeps keys is no module of a list of layers.
    """

    def __init__(
        self, model: compat.Model, groups: EngineGroups, backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        self._model = model
        self._cache = _PassingCache(layers=list(compat.dense_cache(model).layers))
        layers = _layers_of(model)
        missing = groups.writers.keys() - layers.keys()
        if missing:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be compiled: layer {min(missing)} is no module of a list of layers, or "
                "others stand in one module with it. Leave compile_model off"
            )
        joined = partial(compute_as_one, lookup_backend(backend))
        kinds = {kind: _compiled(kind, joined) for kind in {type(layer) for layer in layers.values()}}
        self.joined: list[str] = []
        self._forwards = [(layer, _forward_of(layer, idx, kinds[type(layer)])) for idx, layer in layers.items()]
        self._uncompiled = [(layer, _forward_of(layer, idx, type(layer).forward)) for idx, layer in layers.items()]

    @contextmanager
    def joining_products(self) -> Iterator[None]:
        """Run a pass uncompiled, and join the weights of products that read one tensor; before the first other pass."""
        forwards, self._forwards = self._forwards, self._uncompiled
        try:
            with joining_products(self._model, [layer for layer, _ in forwards]) as self.joined:
                yield
        finally:
            self._forwards = forwards

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Run the model over tokens in one row; as :func:`~pagedkv.probe.compat.forward` does.

        Args:
            token_ids, positions: int64 ``[1, tokens]``, at least :data:`LEAST_TOKENS` tokens.
            wanted: int64 ``[n]``.

        Returns:
            ``[n, vocabulary]``, of the model's type.
        """
        with self._own_layers():
            return compat.forward(self._model, wanted, self._cache, input_ids=token_ids, position_ids=positions)

    @contextmanager
    def _own_layers(self) -> Iterator[None]:
        """Make the model call these layers, within a context in which the engine has borrowed the model."""
        try:
            for layer, forward in self._forwards:
                vars(layer)["forward"] = forward  # an attribute of this object; the class has its own
            yield
        finally:
            for layer, _ in self._forwards:
                vars(layer).pop("forward", None)


def what_prevents_compiling(groups: EngineGroups) -> str | None:
    """Return why a model's forward pass cannot be compiled; None: no obstacle is known."""
    if len(groups.attention) != len(groups.writers):
        return "some layers read the keys of other layers, and an operator knows a layer by the keys that it writes"
    if groups.latents:
        return "it keeps latents, and the operator of compiled code attends to keys and values"
    return groups.varying_shapes


def first_tokens(max_tokens: int) -> int:
    """Choose the number of tokens of the pass that compiles, at most ``max_tokens``."""
    return next((count for count in FIRST_TOKENS if count <= max_tokens), LEAST_TOKENS)


def _layers_of(model: compat.Model) -> dict[int, nn.Module]:
    """Find the modules of lists in which one layer alone is numbered, by that number."""
    found: dict[int, nn.Module] = {}
    for parts in model.modules():
        if not isinstance(parts, nn.ModuleList):
            continue
        for part in parts:
            numbers = {getattr(module, "layer_idx", None) for module in part.modules()} - {None}
            if len(numbers) == 1 and "forward" not in vars(part):
                found.setdefault(int(numbers.pop() or 0), part)
    return found


def _compiled(kind: type[nn.Module], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the forward of a class of layers, which takes the layer first."""

    def run(layer: nn.Module, *given: Any, **options: Any) -> Any:  # noqa: ANN401 - the layer's own
        return kind.forward(layer, *given, **options)

    # torch keeps versions by the code object, few of each: every model has code of its own
    own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, backend=backend, dynamic=True, fullgraph=True)
    return compiled


def _forward_of(layer: nn.Module, layer_idx: int, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*given: Any, **options: Any) -> Any:  # noqa: ANN401 - the layer's own
        _pass().begin_layer(layer_idx)
        return compiled(layer, *given, **options)

    return forward
