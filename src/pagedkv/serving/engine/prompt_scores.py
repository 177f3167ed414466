"""Log-probabilities of a prompt's tokens, chunk by chunk as the prompt is computed.

The logits at a position tell of the token behind it, so what a chunk tells of begins one token later than the chunk,
and the prompt's last token tells of none. A prompt that hits would not be computed; so as much of it as is not told
yet hits nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagedkv.memory.contract.arrays import Int64Array
from pagedkv.memory.scheduling import Chunk
from pagedkv.serving.engine.engine_request import EngineRequest
from pagedkv.serving.engine.heads import ModelHead
from pagedkv.serving.engine.sampling import prompt_logprobs

__all__ = ["PromptScoring", "scorings_of"]


@dataclass(frozen=True, slots=True, eq=False)
class PromptScoring:
    """What a step's chunk is to tell of its prompt.

    Args:
        request: whose prompt it is.
        first: place in the flat row of the first token whose logits are wanted.
        next_ids: the tokens behind it and those that follow it.
    """

    request: EngineRequest
    first: int
    next_ids: list[int]

    def take(self, tokens: Int64Array, head: ModelHead) -> None:
        """Tell what a pass has computed of it. Memory: a bounded number of logits at once.

        Args:
            tokens: int64, places in the flat row of the pass's tokens, ascending.
            head: what gives their logits.
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
    """Tell what chunks are to tell, where it is asked for: of each request, chunk and its place in the flat row."""
    scorings = []
    for request, chunk, start in chunks:
        if request.needs_prompt_logprobs:
            first = len(request.prompt_logprobs)  # logits at position p tell of the token at p + 1
            next_ids = request.prompt_token_ids[first + 1 : chunk.stop + 1].tolist()
            if next_ids:
                scorings.append(PromptScoring(request, start + first - chunk.start, next_ids))
    return scorings
