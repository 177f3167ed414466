"""CompiledModel: a model's forward pass compiled by torch.compile, with attention as one operator that it leaves alone.

Compiled code must not see what an engine does at each step. So the cache hands keys and values through, and attention
is an operator of this library, which writes them into their slots and attends, for the pass that is under way::

    model     q, k, v of layer 7  ->  cache.update: k, v  ->  pagedkv::attend(q, k, v, 7)  ->  ...
    operator                                                  writes k, v into slots, reads blocks

Everything between two operators is fused. Sizes are symbols, so that one compilation serves all of them; a single token
would need another one, and is padded. Compiling takes minutes for a large model, once a process.
"""

from collections.abc import Callable
from typing import Any, Final, final

import torch

from pagedkv.memory.contract.errors import UnsupportedModelError
from pagedkv.serving.engine import compat
from pagedkv.serving.engine.current_pass import current_pass
from pagedkv.serving.engine.forward_pass import ForwardPass
from pagedkv.serving.engine.grouping import EngineGroups

__all__ = ["COMPILED", "LEAST_TOKENS", "CompiledModel", "what_prevents_compiling"]

COMPILED: Final = "pagedkv_compiled"
LEAST_TOKENS: Final = 2
"""Sizes of 0 and 1 are constants to torch.compile, others symbols."""


@torch.library.custom_op("pagedkv::attend", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, layer_idx: int
) -> torch.Tensor:
    """Write and attend: ``[rows, heads, tokens, dim]`` each -> ``[rows, tokens, heads, value_dim]``."""
    forward_pass = current_pass()
    assert isinstance(forward_pass, ForwardPass), "compiled code runs in passes over blocks alone"
    return forward_pass.attend_layer(layer_idx, query, key, value, sinks)


@_attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, layer_idx: int
) -> torch.Tensor:
    del key, sinks, layer_idx
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _attention(
    module: Any,  # noqa: ANN401 - a layer of attention, which has its number
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: Any,  # noqa: ANN401 - each model's own
) -> tuple[torch.Tensor, None]:
    del attention_mask
    return torch.ops.pagedkv.attend(query, key, value, options.get("s_aux"), module.layer_idx), None


compat.register(COMPILED, _attention)


class _PassingCache(compat.Cache):
    """A cache that keeps nothing, and answers what it was given."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand keys and values through."""
        del layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Say that no token came before: positions are given. Raises UnsupportedModelError: a layer counts its own."""
        if layer_idx is not None:
            raise UnsupportedModelError("a layer asks the cache for its positions, which differ from row to row")
        return 0


@final
class CompiledModel:
    """An attention-only model, compiled.

    Args:
        model: the model, which others may go on calling as it is.
        backend: of torch.compile.
    """

    def __init__(self, model: compat.Model, backend: str = "inductor") -> None:
        self._model = model
        self._cache = _PassingCache(layers=list(compat.dense_cache(model).layers))
        self._compiled: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Run the model over tokens in one row; as :func:`~pagedkv.serving.engine.compat.forward` does.

        Args:
            token_ids, positions: int64 ``[1, tokens]``, at least :data:`LEAST_TOKENS` tokens.
            wanted: int64 ``[n]``.

        Returns:
            float32 ``[n, vocabulary]``.
        """
        num_wanted = len(wanted)
        if num_wanted < LEAST_TOKENS:
            wanted = torch.nn.functional.pad(wanted, (0, LEAST_TOKENS - num_wanted))
        inputs = {"input_ids": token_ids, "position_ids": positions, "past_key_values": self._cache}
        logits: torch.Tensor = compat.forward_by(self._compiled, self._model, wanted, **inputs)
        return logits[:num_wanted]


def what_prevents_compiling(groups: EngineGroups) -> str | None:
    """Return why a model's forward pass cannot be compiled; None: no obstacle is known."""
    if len(groups.attention) != len(groups.writers):
        return "some layers read the keys of other layers, and an operator knows a layer by the keys that it writes"
    return groups.varying_shapes
