"""Sample: one answer under way, with its sampled sequence, its stop rules and its log-probabilities.

It is independent of rows and blocks: a preemption by swap does not change it, and a preemption by recompute only if
several answers of one prompt start again.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import final

from pagedkv.engine.outputs import Completion, FinishReason
from pagedkv.engine.sampling import Place, SampledSequence, StopDetector, TokenLogprobs

__all__ = ["Decode", "Sample"]

Decode = Callable[[Sequence[int]], str]


@final
class Sample:
    """One answer.

    Args:
        index: its place among the request's answers.
        sequence: its tokens and their state for sampling.
        stop_ids: tokens that end it; the model's end tokens are among them unless the request ignores them.
        max_tokens: most tokens of it.
        decode: maps token ids to text; needed for stop texts alone.

    Attributes:
        place: its place for a row of logits without drafts.
        finish_reason: why it ended; stop: the token id or text that ended it; both None while it has not ended.
        score: its score in a beam search.
        num_continued: leading tokens that another engine generated.
    """

    def __init__(
        self,
        index: int,
        sequence: SampledSequence,
        stop_ids: Iterable[int],
        max_tokens: int,
        decode: Decode | None = None,
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.place = Place(sequence)
        self.finish_reason: FinishReason | None = None
        self.stop: int | str | None = None
        self.score: float | None = None
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        self._decode = decode if sequence.params.stop else None
        self.num_continued = sequence.num_generated
        self._stops = self._new_stops()
        self._logprobs: list[TokenLogprobs] = []

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens; not to be changed."""
        return self.sequence.generated_ids

    def logprobs_from(self, first: int) -> tuple[TokenLogprobs, ...] | None:
        """Return the log-probabilities of its tokens from index ``first`` on; None if they were not requested."""
        first = max(0, first - self.num_continued)
        return tuple(self._logprobs[first:]) if self.sequence.params.logprobs is not None else None

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a sampled token; return whether it ends the answer by a stop rule, and not by its length."""
        self.sequence.append_sampled(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        ending = self._stops.append((token_id,))
        if ending is None:
            return False
        self.finish_reason, self.stop = ending.reason.value, ending.stop
        return ending.reason.value == "stop"

    def go_on_as(self, sequence: SampledSequence) -> None:
        """Replace its sequence, as a beam whose place another one takes."""
        self.sequence, self.place = sequence, Place(sequence)

    def begin_again(self) -> None:
        """Drop all tokens generated here."""
        self.sequence.truncate(self.num_continued)
        self._logprobs.clear()
        self._stops = self._new_stops()

    def completion(self) -> Completion:
        """Return its tokens so far. O(tokens)."""
        return Completion(
            self.index,
            tuple(self.token_ids),
            self.finish_reason,
            self._stops.text if self._decode is not None else None,
            self.stop,
            self.logprobs_from(0),
            self.score,
        )

    def _new_stops(self) -> StopDetector:
        stops = StopDetector(self.sequence.params, self._stop_ids, self._decode, self._max_tokens)
        stops.append(self.sequence.generated_ids)
        return stops
