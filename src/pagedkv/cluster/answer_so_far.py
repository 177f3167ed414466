"""AnswerSoFar: the part of an answer that was sent to a client, and its continuation after the loss of a replica.

A single answer is continued: another replica computes the prompt and the sent tokens, and generates the next tokens
with the same noise, since noise depends on positions (``Intent.answered``). Several answers, and beams, are generated
again from the beginning; the tokens that were already sent are compared and skipped. If they differ, the answer cannot
be continued, and the request ends with an error: no client gets tokens of two different answers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from pagedkv.engine import Completion, Intent, RequestOutput, SamplingParams, TokenLogprobs, TokenUpdate
from pagedkv.engine.outputs import FinishReason
from pagedkv.errors import EngineError

__all__ = ["AnswerSoFar"]


@final
class AnswerSoFar:
    """The answers to one prompt, across all attempts to serve it.

    Args:
        prompt_token_ids: the prompt.
        params: its sampling parameters.

    Attributes:
        num_attempts: replicas that have served the request so far.
    """

    def __init__(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._params = params
        self._is_single = params.n == 1 and params.num_beams == 1
        self._sent: list[list[int]] = [[] for _ in range(params.n)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(params.n)]
        self._reasons: list[FinishReason | None] = [None] * params.n
        self._num_skipped = [0] * params.n
        self._num_continued = 0
        self._num_cached: int | None = None
        self._cached_at = 0  # the attempt with these hits
        self.num_attempts = 1

    @property
    def num_sent(self) -> int:
        """Number of sent tokens of the longest answer."""
        return max(map(len, self._sent))

    def begin_again(self, intent: Intent) -> Intent:
        """Begin the next attempt after the loss of a replica; return the intent of the request to send."""
        self.num_attempts += 1
        if self._is_single:
            self._num_continued = len(self._sent[0])
            return replace(intent, answered=tuple(self._sent[0]))
        self._num_skipped = [0] * self._params.n
        return intent

    def note_cached(self, num_cached_tokens: int | None) -> None:
        """Record the hit tokens of the prompt, from the first attempt alone: later ones also hit what it computed."""
        if self._num_cached is None:
            self._num_cached, self._cached_at = num_cached_tokens, self.num_attempts

    def take(self, updates: Sequence[TokenUpdate]) -> tuple[TokenUpdate, ...]:
        """Return the updates without tokens that were already sent. Raises EngineError: an answer differs from them."""
        return tuple(new for each in updates if (new := self._new(each)) is not None)

    def _new(self, update: TokenUpdate) -> TokenUpdate | None:
        place, tokens, scores = update.index, update.token_ids, update.logprobs
        sent = self._sent[place]
        if not self._is_single and self._num_skipped[place] < len(sent):
            at = self._num_skipped[place]
            known = min(len(tokens), len(sent) - at)
            if tuple(sent[at : at + known]) != tokens[:known]:
                raise EngineError(
                    f"a replica failed after {len(sent)} tokens of answer {place}, and another replica's answer "
                    f"differs from token {at} on: the answer cannot be continued"
                )
            self._num_skipped[place] += known
            tokens, scores = tokens[known:], None if scores is None else scores[known:]
            if not tokens and (update.finish_reason is None or self._reasons[place] is not None):
                return None
        sent += tokens
        self._num_skipped[place] += len(tokens)
        self._logprobs[place] += scores or ()
        self._reasons[place] = update.finish_reason
        return replace(update, token_ids=tokens, logprobs=scores)

    def complete(self, output: RequestOutput) -> RequestOutput:
        """Return the last attempt's output with the log-probabilities and the hits of earlier attempts.

        The hits are those of the first attempt that had any token. If that was another one, the loads and the
        explanation of the last attempt do not belong to them, and are left out.
        """
        completions = output.completions
        if self._num_continued and self._params.logprobs is not None:
            completions = tuple(
                replace(each, logprobs=tuple(self._logprobs[each.index][: self._num_continued]) + (each.logprobs or ()))
                for each in completions
            )
        output = replace(output, completions=completions)
        if self._num_cached is None or self._cached_at == self.num_attempts:
            return output
        return replace(output, num_cached_tokens=self._num_cached, num_loaded_tokens={}, explanation=None)

    def last_updates(self, reason: FinishReason) -> tuple[TokenUpdate, ...]:
        """Return an update that ends each unfinished answer, for a request that ends without a replica's output."""
        return tuple(TokenUpdate(0, place, (), reason) for place, ended in enumerate(self._reasons) if ended is None)

    def ended(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """Return an output with the sent tokens, for a request that ended without a replica's output."""
        completions = tuple(
            Completion(place, tuple(sent), self._reasons[place] or reason) for place, sent in enumerate(self._sent)
        )
        return RequestOutput(
            0, self._prompt_token_ids, completions, self._num_cached or 0, 0, 0, None, None, error=error
        )
