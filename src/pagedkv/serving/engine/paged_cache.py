"""PagedCache: what a model takes for its cache. It keeps nothing itself but the recurrent states of one pass.

Updates go to the pass that is under way. Layers without state stand for themselves, since models look at their kinds.
"""

from collections.abc import Mapping
from typing import final

import torch

from pagedkv.memory.contract.errors import EngineError
from pagedkv.serving.engine import compat
from pagedkv.serving.engine.forward_pass import ForwardPass

__all__ = ["PagedCache"]


@final
class PagedCache(compat.Cache):
    """The cache of one engine, for all of its passes.

    Args:
        model: whose cache it stands for.
    """

    def __init__(self, model: compat.Model) -> None:
        self._pristine = compat.dense_cache(model).layers
        super().__init__(layers=list(self._pristine))
        self._pass: ForwardPass | None = None

    def begin(
        self,
        forward_pass: ForwardPass,
        states: Mapping[int, compat.State],
        recurrent: list[int],
        *,
        is_prompt: bool,
    ) -> None:
        """Begin a pass.

        Args:
            forward_pass: the pass.
            states: the states that recurrent layers continue, by number of the layer, each ``[sequences, ...]``; they
                are changed in place. None where sequences begin.
            recurrent: numbers of all recurrent layers.
            is_prompt: they are to take the tokens as a prompt's, also where it is one token.
        """
        self._pass = forward_pass
        for layer_idx in recurrent:
            layer = compat.empty_layer(self._pristine[layer_idx])
            compat.load_state(layer, states.get(layer_idx, {}), is_prompt=is_prompt)
            self.layers[layer_idx] = layer

    def states(self, layer_idx: int) -> compat.State:
        """Give the state of a recurrent layer after the pass."""
        return compat.state_tensors(self.layers[layer_idx])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand keys and values on to the pass."""
        return self._current().update(layer_idx, key_states, value_states)

    def get_seq_length(  # type: ignore[override]  # a tensor, where a layer adds it to places
        self, layer_idx: int | None = None
    ) -> "int | torch.Tensor":
        """Tell how many tokens came before.

        Asked without a layer, for masks that are not made: 0. A layer that asks for itself adds the answer to
        ``arange(tokens)`` to know its positions (Llama 4): it gets what is to be added, for every token.
        """
        if layer_idx is None or self._pass is None:
            return 0
        return self._pass.offsets[0] if len(self._pass.offsets) == 1 else self._pass.offsets

    def _current(self) -> ForwardPass:
        if self._pass is None:
            raise EngineError("the engine's cache was used outside of a step")
        return self._pass
