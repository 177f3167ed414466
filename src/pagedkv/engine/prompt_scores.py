"""Log-probabilities of prompts, for which a model's head is called by itself.

The head of a model by itself: logits of hidden states, some at a time, with whatever the model does to them.

What a model does behind its body (a bias, a soft cap, a scale) is its own code and known to no one else. So the body is
watched while it answers a pass, and for each further slice of the vocabulary's work the model is called once more with
a body that answers these hidden states at once::

    pass       ids -> body -> hidden [rows, tokens, width] -> head -> logits of the wanted tokens
    a slice    ids ->         hidden [1, n, width]         -> head -> logits [n, vocabulary]

Log-probabilities of a prompt's tokens, chunk by chunk as the prompt is computed.

The logits at a position score the token after it. So a chunk scores tokens from its second one to the first after its
end, and the prompt's last position scores none. Tokens that are hit have no logits, so a request hits no further than
its prompt has been scored.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from pagedkv.contract.arrays import Int64Array
from pagedkv.engine.request import EngineRequest
from pagedkv.engine.sampling import prompt_logprobs
from pagedkv.errors import EngineError
from pagedkv.probe import compat
from pagedkv.scheduling import Chunk

__all__ = ["ModelHead", "PromptScoring", "scorings_of", "watched_head"]


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


@dataclass(frozen=True, slots=True, eq=False)
class PromptScoring:
    """The tokens of a prompt that a step's chunk scores.

    Args:
        request: the request of the prompt.
        first: place in the flat row of the first token whose logits are used.
        next_ids: the tokens after it and after the following ones.
    """

    request: EngineRequest
    first: int
    next_ids: list[int]

    def take(self, tokens: Int64Array, head: ModelHead) -> None:
        """Add the log-probabilities of a pass to the request. Memory: a bounded number of logits at once.

        Args:
            tokens: int64 ``[n]``, places of the pass's tokens in the flat row, ascending.
            head: computes their logits.
        """
        inside = np.flatnonzero((tokens >= self.first) & (tokens < self.first + len(self.next_ids)))
        if not len(inside):
            return
        next_ids = [self.next_ids[place] for place in (tokens[inside] - self.first).tolist()]
        count = self.request.params.prompt_logprobs or 0
        self.request.prompt_logprobs += prompt_logprobs(head.hidden(inside), head.logits, next_ids, count)
        is_open = self.request.needs_prompt_logprobs
        self.request.scheduled.max_hit_tokens = len(self.request.prompt_logprobs) if is_open else None


def scorings_of(chunks: Iterable[tuple[EngineRequest, Chunk, int]]) -> list[PromptScoring]:
    """Return the scorings of requests that need them. ``chunks``: request, chunk, and its start in the flat row."""
    scorings = []
    for request, chunk, start in chunks:
        if request.needs_prompt_logprobs:
            first = len(request.prompt_logprobs)  # logits at position p score the token at p + 1
            next_ids = request.prompt_token_ids[first + 1 : chunk.stop + 1].tolist()
            if next_ids:
                scorings.append(PromptScoring(request, start + first - chunk.start, next_ids))
    return scorings
