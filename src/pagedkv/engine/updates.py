"""TokenUpdate: new tokens of an answer; NewTokens: finds those of a request since the last call."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.outputs import FinishReason
from pagedkv.engine.sample import Sample
from pagedkv.engine.sampling import TokenLogprobs

__all__ = ["NewTokens", "TokenUpdate"]


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """New tokens of one answer, while it is under way.

    Args:
        prompt: index of the prompt among those given; index: of the answer among the prompt's.
        token_ids: the new tokens.
        finish_reason: why the answer ended, in its last update; else None.
        logprobs: of each new token; None if they were not requested.
        stop: the token id or the text that ended the answer; None if it has not ended, or ended otherwise.
    """

    prompt: int
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop: int | str | None = None


@final
class NewTokens:
    """Follows one request, and returns each new token once.

    An answer that starts again after a preemption has no new tokens until it is longer than before.

    Args:
        request: the request.
        prompt: its index among the prompts given.
    """

    def __init__(self, request: EngineRequest, prompt: int = 0) -> None:
        self._request = request
        self._prompt = prompt
        self._num_given = [sample.num_continued for sample in request.samples]
        self._is_over = [False] * len(request.samples)

    def take(self) -> Iterator[TokenUpdate]:
        """Yield an update for each answer with new tokens or a new end. O(new tokens + answers)."""
        for place, sample in enumerate(self._request.samples):
            is_over = sample.finish_reason is not None
            if len(sample.token_ids) > self._num_given[place] or is_over > self._is_over[place]:
                update = self._update(sample, self._num_given[place])
                self._num_given[place] += len(update.token_ids)
                self._is_over[place] = is_over
                yield update

    def _update(self, sample: Sample, first: int) -> TokenUpdate:
        return TokenUpdate(
            self._prompt,
            sample.index,
            tuple(sample.token_ids[first:]),
            sample.finish_reason,
            sample.logprobs_from(first),
            sample.stop,
        )
