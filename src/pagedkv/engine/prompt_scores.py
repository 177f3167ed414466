"""Log-probabilities of a prompt's tokens, chunk by chunk as the prompt is computed.

The logits at a position score the token after it. So a chunk scores tokens from its second one to the first after its
end, and the prompt's last position scores none. Tokens that are hit have no logits, so a request hits no further than
its prompt has been scored.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagedkv.contract.arrays import Int64Array
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.heads import ModelHead
from pagedkv.engine.sampling import prompt_logprobs
from pagedkv.scheduling import Chunk

__all__ = ["PromptScoring", "scorings_of"]


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
