"""Sample: one answer under way. What sampling keeps of it, when it ends, and what was told of its tokens.

It belongs to no row of a batch and to no block: a preemption by swap does not touch it, and one by recompute only where
several answers of one prompt begin again.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import final

from pagedkv.serving.engine.outputs import Completion, FinishReason
from pagedkv.serving.engine.sampling import Place, SampledSequence, StopDetector, TokenLogprobs

__all__ = ["Decode", "Sample"]

Decode = Callable[[Sequence[int]], str]


@final
class Sample:
    """One answer.

    Args:
        index: its place among the request's answers.
        sequence: its tokens, as sampling sees them.
        stop_ids: tokens that end it, the model's own among them where they count.
        max_tokens: tokens at which it ends.
        decode: gives the text of token ids; needed for stop texts alone.

    Attributes:
        place: what a row of logits is given for it.
        finish_reason: why it ended; stop: the token id or text that did it; None while it goes on.
        score: by which a beam search ranks it.
        num_continued: tokens that another engine generated, before which nothing is sampled here.
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
        """What was generated; not to be changed."""
        return self.sequence.generated_ids

    def logprobs_from(self, first: int) -> tuple[TokenLogprobs, ...] | None:
        """Return the log-probabilities of its tokens from one on; None where none were asked for."""
        first = max(0, first - self.num_continued)
        return tuple(self._logprobs[first:]) if self.sequence.params.logprobs is not None else None

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Note a token that was sampled for it; return whether it ends by that token, and not by its length."""
        self.sequence.append_sampled(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        ending = self._stops.append((token_id,))
        if ending is None:
            return False
        self.finish_reason, self.stop = ending.reason.value, ending.stop
        return ending.reason.value == "stop"

    def go_on_as(self, sequence: SampledSequence) -> None:
        """Be another sequence from now on: a beam that another one took the place of."""
        self.sequence, self.place = sequence, Place(sequence)

    def begin_again(self) -> None:
        """Forget all that was generated."""
        self.sequence.truncate(self.num_continued)
        self._logprobs.clear()
        self._stops = self._new_stops()

    def completion(self) -> Completion:
        """Tell how far it has come."""
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
