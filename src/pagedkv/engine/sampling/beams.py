"""Beam search, scored as transformers does it: which beams go on, which are finished, and whether the search is over.

Pure: tokens and scores in, tokens and parents out, without model and cache. The engine computes the log-probabilities
of the beams (:func:`~pagedkv.engine.sampling.sampler.beam_logprobs`), and forks or frees sequences by
:attr:`BeamStep.parents`. The rules are those of transformers' ``generate(num_beams=...)`` without sampling:

- Of all continuations of all beams the best ``num_beams * max(2, 1 + number of end tokens)`` are looked at, so that
  enough go on even where every best one ends.
- A continuation that ends, among the best ``num_beams``, is finished with its score divided by ``length **
  length_penalty``; of what is finished the best ``num_beams`` are kept. The best that do not end go on.
- It is over when no running beam can improve on the worst that is kept, by an estimate that ``early_stopping`` chooses;
  with True, as soon as ``num_beams`` are finished; or when every continuation that was looked at ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, final

import torch

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError, TensorError

NEVER: Final = -1.0e9
"""The score of a beam that does not exist: it loses against any. The number is that of transformers."""


class FinishedBeam(NamedTuple):
    """A finished answer.

    Args:
        token_ids: of the answer, the token that ended it included; score: by which it is ranked.
    """

    token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What a step leaves running.

    Args:
        parents: for each beam, which of the beams before it continues; token_ids: by which token.
        is_over: nothing runs any more; the best are finished.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    is_over: bool


@final
class BeamSearch:
    """The beams of one prompt.

    Args:
        num_beams: that run at once, at least 2.
        max_tokens: tokens of an answer at which it ends.
        end_token_ids: tokens that end an answer.
        length_penalty: exponent of the length that scores are divided by; above 0 it favours long answers.
        early_stopping: True, False or "never".

    Raises:
        ConfigurationError: fewer than two beams, or another word for early_stopping.
    """

    def __init__(
        self,
        num_beams: int,
        max_tokens: int,
        end_token_ids: Iterable[int] = (),
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ) -> None:
        self.num_beams = as_count(num_beams, "num_beams", least=2)
        self._max_tokens = as_count(max_tokens, "max_tokens", least=1)
        if early_stopping not in (True, False, "never"):
            raise ConfigurationError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")
        self._end_ids = frozenset(end_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_seen = self.num_beams * max(2, 1 + len(self._end_ids))
        self._running = [()] * self.num_beams  # type: list[tuple[int, ...]]
        # All beams begin alike: only the first one counts, or each would find the same continuations.
        self._scores = torch.tensor([0.0] + [NEVER] * (self.num_beams - 1), dtype=torch.float32)
        self._finished: list[FinishedBeam] = []
        self._can_improve = True

    @property
    def running(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of the answers that run, the best first."""
        return tuple(self._running)

    @property
    def finished(self) -> tuple[FinishedBeam, ...]:
        """Finished answers, the best first, at most num_beams."""
        return tuple(self._finished)

    def step(self, logprobs: torch.Tensor) -> BeamStep:
        """Continue the beams by one token.

        Args:
            logprobs: float32 ``[num_beams, vocabulary]``: log-softmax of each running beam's logits, processed.

        Raises:
            TensorError: of another shape.

        Cost: the greatest of ``num_beams * vocabulary`` numbers.
        """
        if logprobs.ndim != 2 or len(logprobs) != self.num_beams:  # noqa: PLR2004 - beams and tokens
            raise TensorError(
                f"{self.num_beams} beams need log-probabilities [beams, vocabulary], got {list(logprobs.shape)}"
            )
        vocab_size = logprobs.shape[1]
        summed = (logprobs + self._scores.to(logprobs.device)[:, None]).flatten()
        scores, where = (each.cpu() for each in summed.topk(min(self._num_seen, len(summed))))
        parents, tokens = (where // vocab_size).tolist(), (where % vocab_size).tolist()
        answers = [(*self._running[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        num_tokens = len(answers[0])
        ends = torch.tensor([token in self._end_ids or num_tokens >= self._max_tokens for token in tokens])
        self._finish(answers, scores, ends, num_tokens)
        # An ended continuation is ranked below all others; at the last step it may be extended, which has no effect.
        going_on = scores + ends.float() * NEVER
        self._scores, chosen = going_on.topk(self.num_beams)
        self._running = [answers[index] for index in chosen.tolist()]
        self._can_improve = self._can_improve and self._may_improve(num_tokens)
        is_full = len(self._finished) == self.num_beams and self._early_stopping is True
        is_over = not self._can_improve or is_full or bool(ends.all())
        kept = chosen.tolist()
        return BeamStep(tuple(parents[index] for index in kept), tuple(tokens[index] for index in kept), is_over)

    def _finish(
        self, answers: list[tuple[int, ...]], scores: torch.Tensor, ends: torch.Tensor, num_tokens: int
    ) -> None:
        """Keep the best of what is finished and what ended now among the best ``num_beams``."""
        if not self._can_improve or (self._early_stopping is True and len(self._finished) == self.num_beams):
            return
        normed = scores / num_tokens**self._length_penalty
        ended = [
            FinishedBeam(answer, float(score))
            for answer, score, has_ended in zip(
                answers[: self.num_beams], normed[: self.num_beams], ends[: self.num_beams].tolist(), strict=True
            )
            if has_ended
        ]
        merged = sorted([*self._finished, *ended], key=lambda beam: -beam.score)  # stable: earlier ones first
        self._finished = merged[: self.num_beams]

    def _may_improve(self, num_tokens: int) -> bool:
        """Estimate whether the best running beam can still beat the worst that is kept."""
        is_never = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if is_never else num_tokens
        best = self._scores[0] / length**self._length_penalty
        # Places that nothing finished fills yet score NEVER, so that anything improves on them.
        worst = self._finished[-1].score if len(self._finished) == self.num_beams else NEVER
        return bool(best > worst)
