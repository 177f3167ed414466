"""The tokens of a step: one for each row of logits, by the parameters of that row. A row costs only what it uses.

::

    logits [rows, vocabulary]
      bias, penalties, bans        all rows with them, at once                        (adjusting)
      greatest, or filters, noise  all rows without foreign processors                (choosing, thresholds, drawing)
      log-probabilities            rows with ``logprobs``, of the unchanged logits    (logprobs)
      foreign processors           row by row, after all others, then that row's
                                   filters, noise and log-probabilities               (foreign)

On a GPU :meth:`BatchSampler.begin` samples without a wait of the host (:mod:`~pagedkv.engine.sampling.ahead`).

A row whose foreign processor is not ready is returned as waiting, with its scores, and :meth:`BatchSampler.resume`
tries it again. A row that cannot be sampled is returned as failed, with the error. Neither affects the other rows. The
sampler keeps no state between calls: that is in each
:class:`~pagedkv.engine.sampling.sequence.SampledSequence`.
"""

from collections.abc import Iterable, Sequence
from typing import final

import torch

from pagedkv.contract.arguments import as_count
from pagedkv.device import kernels_for
from pagedkv.engine.sampling.adjusting import Adjustment, Place, features_of
from pagedkv.engine.sampling.ahead import choose_ahead
from pagedkv.engine.sampling.choosing import NO_TOKEN, choose, choose_greatest, greatest_words
from pagedkv.engine.sampling.foreign import apply_foreign
from pagedkv.engine.sampling.logprobs import TokenLogprobs, logprobs_of
from pagedkv.engine.sampling.pending import PendingTokens
from pagedkv.engine.sampling.sampled_tokens import SampledTokens, WaitingRow
from pagedkv.engine.sampling.sequence import Feature
from pagedkv.engine.sampling.tiles import TiledScores, as_scores, tiled
from pagedkv.errors import ConfigurationError

__all__ = ["BatchSampler"]


@final
class BatchSampler:
    """Samples tokens for batches of rows.

    Args:
        vocab_size: columns of the logits.
        draws_ahead: whether :meth:`begin` samples without a wait of the host; None: on a GPU.
        gives_logprobs: whether rows with ``logprobs`` get log-probabilities; False for draft tokens.
    """

    def __init__(self, vocab_size: int, *, draws_ahead: bool | None = None, gives_logprobs: bool = True) -> None:
        self.vocab_size = as_count(vocab_size, "vocab_size", least=1)
        self._draws_ahead = draws_ahead
        self._enabled = ~Feature.NONE if gives_logprobs else ~Feature.LOGPROBS

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Sample one token for each row. The sequences are not changed: append the accepted tokens to them.

        A row behind a draft that is not allowed may fail or wait. That draft is refused, and the row is then unused.

        Args:
            logits: float32 ``[rows, vocabulary]``, on any device. Contiguous logits are changed during the call, and
                restored before it returns or raises.
            places: the sequence of each row, with the drafts before the row; a sequence with drafts has several rows.

        Raises:
            TensorError: logits of another shape or type.
            ConfigurationError: a sequence of another vocabulary.

        Cost: one pass over the logits, and the features that rows use.
        """
        scores = as_scores(logits, len(places), self.vocab_size)
        self._check(places)
        requested = features_of(places) & self._enabled
        if places and requested == Feature.NONE:
            chosen = choose_greatest(scores, places)
            return SampledTokens(chosen.token_ids, failures=chosen.failures)
        answer = _Answer(torch.full((len(places),), NO_TOKEN, dtype=torch.int32, device=scores.device))
        if not places:
            return answer.sampled_tokens()
        apart = {row for row, place in enumerate(places) if place.sequence.features & Feature.FOREIGN}
        together = [row for row in range(len(places)) if row not in apart]
        adjustment = Adjustment(scores, places)
        try:
            adjustment.apply(requested)
            tiles = tiled(scores)
            answer.choose(tiles, together, [places[row] for row in together])
            copies = {row: scores[row : row + 1].clone() for row in sorted(apart)}
        finally:
            adjustment.undo()
        if requested & Feature.LOGPROBS:
            as_given = tiled(scores) if adjustment.has_changed else tiles
            answer.add_logprobs(as_given, together, [places[row] for row in together])
        for row, copy in copies.items():
            has_logprobs = places[row].sequence.features & self._enabled & Feature.LOGPROBS
            as_it_came = scores[row : row + 1].clone() if has_logprobs else None
            answer.apply_foreign_processors(row, WaitingRow(row, places[row], copy, as_it_came))
        return answer.sampled_tokens()

    def begin(self, logits: torch.Tensor, places: Sequence[Place]) -> PendingTokens:
        """Sample as :meth:`sample` does; the host does not wait for the device, unless a row has a foreign processor.

        On a CPU this saves no time, so only batches of greedy rows are left pending. The tokens are those of
        :meth:`sample`, unless two sums of score and noise, or the mass and ``top_p``, differ by no more than the
        rounding of their logarithms and exponentials.
        """
        scores = as_scores(logits, len(places), self.vocab_size)
        self._check(places)
        requested = features_of(places) & self._enabled
        if places and requested == Feature.NONE:
            return PendingTokens.on_their_way(greatest_words(scores), places)
        draws_ahead = scores.is_cuda if self._draws_ahead is None else self._draws_ahead
        if places and draws_ahead and not requested & Feature.FOREIGN:
            words, logprobs = choose_ahead(scores, places, requested, kernels_for(scores.device))
            return PendingTokens.on_their_way(words, places, logprobs)
        sampled = self.sample(logits, places)
        return PendingTokens(sampled.token_ids, sampled)

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Call the foreign processors of waiting rows again. Rows of the result are places in ``waiting``."""
        self._check([each.place for each in waiting])
        device = waiting[0].scores.device if waiting else None
        answer = _Answer(torch.full((len(waiting),), NO_TOKEN, dtype=torch.int32, device=device))
        for index, each in enumerate(waiting):
            answer.apply_foreign_processors(index, each)
        return answer.sampled_tokens()

    def _check(self, places: Sequence[Place]) -> None:
        """Refuse sequences of another vocabulary."""
        for row, place in enumerate(places):
            if place.sequence.vocab_size != self.vocab_size:
                raise ConfigurationError(
                    f"row {row} has a vocabulary of {place.sequence.vocab_size} tokens, and this sampler one of "
                    f"{self.vocab_size}"
                )


class _Answer:
    """The tokens, failures and waiting rows of a batch so far.

    Args:
        token_ids: int32 ``[rows]``, all of them NO_TOKEN.
    """

    def __init__(self, token_ids: torch.Tensor) -> None:
        self._token_ids = token_ids
        self._waiting: list[WaitingRow] = []
        self._failures: dict[int, Exception] = {}
        self._logprobs: dict[int, TokenLogprobs] = {}

    def sampled_tokens(self) -> SampledTokens:
        return SampledTokens(self._token_ids, tuple(self._waiting), self._failures, self._logprobs)

    def choose(self, tiles: TiledScores, rows: Sequence[int], places: Sequence[Place]) -> None:
        """Choose the tokens of rows without foreign processors."""
        if not rows:
            return
        chosen = choose(tiles, rows, places)
        if len(rows) == len(self._token_ids):
            self._token_ids.copy_(chosen.token_ids)
        else:
            self._token_ids[torch.tensor(rows, device=self._token_ids.device)] = chosen.token_ids.int()
        self._failures |= {rows[index]: failure for index, failure in chosen.failures.items()}

    def add_logprobs(self, tiles: TiledScores, rows: Iterable[int], places: Iterable[Place]) -> None:
        """Add log-probabilities of rows with ``logprobs`` and a token; ``tiles`` are of the unchanged logits."""
        wanted = [
            (row, place.sequence.params.logprobs)
            for row, place in zip(rows, places, strict=True)
            if place.sequence.params.logprobs is not None and row not in self._failures
        ]
        if wanted:
            chosen_rows = [row for row, _ in wanted]
            token_ids = self._token_ids[torch.tensor(chosen_rows, device=self._token_ids.device)].tolist()
            logprobs = logprobs_of(tiles, chosen_rows, token_ids, [count for _, count in wanted])
            self._logprobs |= dict(zip(chosen_rows, logprobs, strict=True))

    def apply_foreign_processors(self, row: int, waiting: WaitingRow) -> None:
        """Call a row's foreign processors; if all are ready, choose its token."""
        sequence, drafts = waiting.place
        try:
            scores = apply_foreign(
                sequence.processors, sequence.token_ids(drafts), sequence.num_prompt_tokens, waiting.scores.clone()
            )
        except Exception as problem:  # noqa: BLE001 - any error fails this row alone
            self._failures[row] = problem
            return
        if scores is None:
            self._waiting.append(waiting)
            return
        chosen = choose(tiled(scores.contiguous()), [0], [waiting.place])
        self._token_ids[row] = int(chosen.token_ids[0])
        if chosen.failures:
            self._failures[row] = chosen.failures[0]
        elif waiting.logits is not None:
            count = sequence.params.logprobs or 0
            token_ids = chosen.token_ids.tolist()
            self._logprobs[row] = logprobs_of(tiled(waiting.logits), [0], token_ids, [count])[0]
