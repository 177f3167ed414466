"""Beams: a request that is answered by beam search. Its beams are its rows, its answers the finished hypotheses.

The search (:class:`~pagedkv.engine.sampling.BeamSearch`) selects the parent and the token of each new beam. The
scheduler forks and frees rows accordingly, and the sampled sequences are forked here. Beams that are preempted by
recompute start again.
"""

from typing import final

import torch

from pagedkv.engine.sample import Sample
from pagedkv.engine.sampling import BeamSearch, BeamStep, SamplingParams, beam_logprobs
from pagedkv.errors import SamplingError

__all__ = ["Beams"]


@final
class Beams:
    """The beams of one request.

    Args:
        params: parameters of the request.
        beams: one for each row, without generated tokens.
        stop_ids: tokens that end an answer.
        max_tokens: most tokens of an answer.
    """

    def __init__(self, params: SamplingParams, beams: list[Sample], stop_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._beams = beams
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._search = self._new_search()

    @property
    def live(self) -> list[Sample]:
        """The beams, in the order of their rows."""
        return list(self._beams)

    def step(self, logits: torch.Tensor) -> BeamStep:
        """Extend all beams by a token.

        Args:
            logits: float32 ``[num_beams, vocabulary]``.

        Raises:
            SamplingError: no beam has a token with a finite score.
        """
        logprobs = beam_logprobs(logits, [beam.place for beam in self._beams])
        if not bool(torch.isfinite(logprobs.amax())):
            raise SamplingError("no beam can go on: the model gave no numbers, or bias and bans forbid every token")
        step = self._search.step(logprobs)
        sequences = [self._beams[parent].sequence for parent in step.parents]
        for index, (beam, sequence, token) in enumerate(zip(self._beams, sequences, step.token_ids, strict=True)):
            grown = sequence.fork(index)
            grown.append_sampled(token)
            beam.go_on_as(grown)
        return step

    def tell(self, answers: list[Sample]) -> None:
        """Copy the best finished hypotheses into the answers, the best first."""
        for answer, finished in zip(answers, self._search.finished, strict=False):
            answer.score = finished.score
            for token in finished.token_ids:
                answer.take(token)

    def begin_again(self) -> None:
        """Drop all generated tokens, and start the search again."""
        for beam in self._beams:
            beam.begin_again()
        self._search = self._new_search()

    def _new_search(self) -> BeamSearch:
        return BeamSearch(
            self._params.num_beams,
            self._max_tokens,
            self._stop_ids,
            length_penalty=self._params.length_penalty,
            early_stopping=self._params.early_stopping,
        )
