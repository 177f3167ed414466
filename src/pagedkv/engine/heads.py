"""The head of a model by itself: logits of hidden states, some at a time, with whatever the model does to them.

What a model does behind its body (a bias, a soft cap, a scale) is its own code and known to no one else. So the body is
watched while it answers a pass, and for each further slice of the vocabulary's work the model is called once more with
a body that answers these hidden states at once::

    pass       ids -> body -> hidden [rows, tokens, width] -> head -> logits of the wanted tokens
    a slice    ids ->         hidden [1, n, width]         -> head -> logits [n, vocabulary]
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from pagedkv.contract.arrays import Int64Array
from pagedkv.engine import compat
from pagedkv.errors import EngineError

__all__ = ["ModelHead", "watched_head"]


@final
class ModelHead:
    """Computes logits of hidden states.

    Args:
        model: the model; its body is not called here.
    """

    def __init__(self, model: compat.Model) -> None:
        self._model = model
        self._body = compat.body(model)
        self._answer: Any = None

    def note(self, answer: object) -> None:
        """Keep the output of the body for a pass."""
        self._answer = answer

    def hidden(self, places: Int64Array) -> torch.Tensor:
        """Return hidden states of tokens of the pass, by their places in it: ``[places, width]``."""
        hidden = getattr(self._answer, "last_hidden_state", None)
        if not isinstance(hidden, torch.Tensor):
            raise EngineError(
                f"the body of {type(self._model).__name__} answers no last_hidden_state: log-probabilities of prompts "
                "cannot be told"
            )
        return hidden.flatten(0, 1)[torch.from_numpy(places).to(hidden.device)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, vocabulary]`` of hidden states ``[n, width]``."""
        answer = copy.copy(self._answer)
        answer.last_hidden_state = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._body.forward = lambda *_, **__: answer
        try:
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._body.forward  # an attribute of this object; the class has its own
        return logits


@contextmanager
def watched_head(model: compat.Model) -> Iterator[ModelHead]:
    """Keep the output of a model's body during a pass, so that its head can be called afterwards."""
    head = ModelHead(model)
    handle = compat.body(model).register_forward_hook(lambda _, __, answer: head.note(answer))
    try:
        yield head
    finally:
        handle.remove()
