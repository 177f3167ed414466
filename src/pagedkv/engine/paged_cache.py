"""PagedCache: the cache object that a model is called with. It keeps only the recurrent states of one pass.

Updates go to the pass under way. Layers without state are those of the dense cache, since models look at their types.
"""

from collections.abc import Mapping
from typing import final

import torch

from pagedkv.engine import compat
from pagedkv.engine.forward_pass import ForwardPass
from pagedkv.errors import EngineError

__all__ = ["PagedCache"]


@final
class PagedCache(compat.Cache):
    """The cache of one engine, for all of its passes.

    Args:
        model: the model, whose dense cache it replaces.
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
        """Return the state of a recurrent layer after the pass."""
        return compat.state_tensors(self.layers[layer_idx])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass keys and values on to the pass under way."""
        return self._current().update(layer_idx, key_states, value_states)

    def get_seq_length(  # type: ignore[override]  # a tensor, where a layer adds it to places
        self, layer_idx: int | None = None
    ) -> "int | torch.Tensor":
        """Return the number of tokens before the pass, as models use it.

        Without a layer it is for masks, which are not made here: 0. A layer adds it to ``arange(tokens)`` for its
        positions (Llama 4): it gets the offset of every token.
        """
        if layer_idx is None or self._pass is None:
            return 0
        return self._pass.offsets[0] if len(self._pass.offsets) == 1 else self._pass.offsets

    def _current(self) -> ForwardPass:
        if self._pass is None:
            raise EngineError("the engine's cache was used outside of a step")
        return self._pass
