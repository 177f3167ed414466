"""From logits to sampled tokens: one for each row of logits, by the parameters of that row.

A row costs only what it uses. The parameters of many requests become columns, so that all rows of one kind are computed
together::

    logits [rows, vocabulary]
      bias, penalties, bans        all rows with them, at once: few scores, read, changed and put back afterwards
      greatest, or filters, noise  all rows without foreign processors                (drawing)
      log-probabilities            rows with ``logprobs``, of the unchanged logits    (logprobs)
      foreign processors           row by row, after all others, then that row's
                                   filters, noise and log-probabilities               (foreign)

Scores are adjusted in the order of transformers: bias, repetition penalty, (presence and frequency, which it lacks,)
bad words, minimum length. A row whose foreign processor is not ready is returned as waiting, with its scores, and
:meth:`BatchSampler.resume` tries it again. A row that cannot be sampled, as where its greatest score is not finite, is
returned as failed, with the error. Neither affects the other rows. The sampler keeps no state between calls: that is in
each :class:`~pagedkv.engine.sampling.sequence.SampledSequence`.

On a GPU :meth:`BatchSampler.begin` samples without a wait of the host, which can schedule the next step meanwhile; the
next step reads the tokens on the device. The rules and the noise are the same, by other kernels: thresholds are found
without sorting, and every token is perturbed, since the lengths of lists of candidates would be known on the device
alone::

    scores [rows, vocabulary]
      bias, penalties, bans        written in place, and undone after the rest
      find_least, draw_tokens      of all rows at once, greedy ones among them                 (device.kernels)
      greatest score               shows why a row has no token
      log-probabilities            of the unchanged logits                                     (logprobs)
    words int32 [2, rows]          copied to the host

Parameters are sent as one array of 64-bit words::

    [6, rows]   seeds | samples | positions | top_k | top_p, float64 | temperatures and min_p, float32
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contract.arguments import as_count
from pagedkv.device import Draws, Filters, kernels_for
from pagedkv.engine.sampling.drawing import (
    WINDOW,
    RowFilters,
    TiledScores,
    draw,
    draw_from_window,
    keys_of,
    thresholds,
    tiled,
)
from pagedkv.engine.sampling.foreign import apply_foreign
from pagedkv.engine.sampling.logprobs import LogprobColumns, TokenLogprobs, Wish, logprob_columns, logprobs_of
from pagedkv.engine.sampling.sequence import Feature, SampledSequence
from pagedkv.errors import ConfigurationError, SamplingError, TensorError

NO_TOKEN: Final = -1
"""The token id of a row that waits or has failed."""
FEW_SCORES: Final = 1024
"""At most so many scores a row are reduced without tiles, which are slower there."""


class Chosen(NamedTuple):
    """Tokens of rows.

    Args:
        token_ids: integers ``[rows]``, NO_TOKEN for a row that failed; failures: the error of each such row.
    """

    token_ids: torch.Tensor
    failures: dict[int, Exception]


class Place(NamedTuple):
    """The sequence of a row of logits, with the drafts between its answer and the row.

    Args:
        sequence: the sequence.
        drafts: drafts after the answer that precede this row's position, not accepted yet.
    """

    sequence: SampledSequence
    drafts: Sequence[int] = ()


def choose(tiles: TiledScores, rows: Sequence[int], places: Sequence[Place]) -> Chosen:
    """Choose a token for each of these rows of the scores; ``places[i]`` is the sequence of ``rows[i]``."""
    device = tiles.scores.device
    chosen = torch.full((len(rows),), NO_TOKEN, dtype=torch.int64, device=device)
    at = torch.tensor(rows, dtype=torch.int64, device=device)
    is_noisy = [bool(place.sequence.features & Feature.NOISE) for place in places]
    noisy = [index for index, drawn in enumerate(is_noisy) if drawn]
    greedy = [index for index, drawn in enumerate(is_noisy) if not drawn]
    if greedy:
        which = torch.tensor(greedy, device=device)
        chosen[which] = tiles.argmax(at[which])
    for is_filtered in (False, True):
        drawn = [index for index in noisy if bool(places[index].sequence.features & Feature.FILTERS) == is_filtered]
        if drawn:
            which = torch.tensor(drawn, device=device)
            draw_some = _draw_filtered if is_filtered else _draw_unfiltered
            chosen[which] = draw_some(tiles, at[which], [places[index] for index in drawn])
    return _without_failures(chosen, tiles.maxima[at].amax(dim=1), places)


def choose_greatest(scores: torch.Tensor, places: Sequence[Place]) -> Chosen:
    """Choose the token with the greatest score of every row, the lowest id among equal ones: one pass over the scores.

    ``places[i]`` is the sequence of row ``i``. The result is int32 on the host, which waits for the device once.
    """
    words = greatest_words(scores).cpu()
    return _without_failures(words[0], words[1].view(torch.float32), places)


def greatest_words(scores: torch.Tensor) -> torch.Tensor:
    """Find the token with the greatest score of every row, the lowest id among equal ones, on the scores' device.

    Returns int32 ``[2, rows]``: token ids, and the bits of their float32 scores, so that one copy moves both to the
    host.
    """
    if scores.shape[1] <= FEW_SCORES:
        token_ids, greatest = scores.argmax(dim=1), scores.amax(dim=1)
    else:
        tiles = tiled(scores)
        token_ids = tiles.argmax(torch.arange(len(scores), device=scores.device))
        greatest = tiles.maxima.amax(dim=1)
    return torch.stack([token_ids.int(), greatest.view(torch.int32)])


def _draw_unfiltered(tiles: TiledScores, rows: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    temperatures = _filters(rows, places).temperatures
    everything = torch.full_like(temperatures, -torch.inf)
    return draw(tiles, rows, temperatures, everything, _keys(places, rows.device))


def _draw_filtered(tiles: TiledScores, rows: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """Draw from the window of a row's greatest scores if it has all that the filters keep, and else from all tiles."""
    filters, keys = _filters(rows, places), _keys(places, rows.device)
    token_ids, window = tiles.largest(rows, WINDOW)
    least = thresholds(tiles, filters, window)
    tokens = draw_from_window(token_ids, window, filters.temperatures, least, keys)
    is_wider = window[:, -1] >= least
    wider = is_wider.nonzero()[:, 0] if window.shape[1] < tiles.scores.shape[1] else rows[:0]
    if len(wider):
        tokens[wider] = draw(tiles, rows[wider], filters.temperatures[wider], least[wider], keys[wider])
    return tokens


def kept_least(tiles: TiledScores, rows: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """Find the least score that each row's filters keep: float32 ``[rows]``, -inf for a row that keeps all."""
    return thresholds(tiles, _filters(rows, places), tiles.largest(rows, WINDOW)[1])


def _filters(rows: torch.Tensor, places: Sequence[Place]) -> RowFilters:
    """Put the parameters of rows into columns, with a temperature of 1 for a greedy row."""
    params = [place.sequence.params for place in places]
    device = rows.device
    return RowFilters(
        rows,
        _column([each.temperature or 1.0 for each in params], torch.float32, device),
        _column([each.top_k for each in params], torch.int64, device),
        _column([each.top_p for each in params], torch.float64, device),
        _column([each.min_p for each in params], torch.float32, device),
    )


def _keys(places: Sequence[Place], device: torch.device) -> torch.Tensor:
    columns = [(place.sequence.seed, place.sequence.sample, place.sequence.position(place.drafts)) for place in places]
    return keys_of(*torch.tensor(columns, dtype=torch.int64).T).to(device)


def _column(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def _without_failures(token_ids: torch.Tensor, greatest: torch.Tensor, places: Sequence[Place]) -> Chosen:
    """Set NO_TOKEN and an error for rows whose greatest score is not finite; -inf means that no token is allowed."""
    is_finite = torch.isfinite(greatest)
    if bool(is_finite.all()):
        return Chosen(token_ids, {})
    failures: dict[int, Exception] = {}
    for index in (~is_finite).nonzero()[:, 0].tolist():
        if float(greatest[index]) == -torch.inf:
            reason = "no token is allowed: its bias, its bans or a foreign processor forbid all of them"
        else:
            reason = f"its greatest score is {float(greatest[index])}, from the model or a foreign processor"
        position = places[index].sequence.position(places[index].drafts)
        failures[index] = SamplingError(f"position {position} of this sequence cannot be sampled: {reason}")
        token_ids[index] = NO_TOKEN
    return Chosen(token_ids, failures)


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row that its foreign processors have not answered yet.

    Args:
        row: its place in the batch that it came with; place: whose it is.
        scores: float32 ``[1, vocabulary]``, with bias, penalties and bans: a copy of its own.
        logits: float32 ``[1, vocabulary]`` as the model gave them, where log-probabilities are wanted.
    """

    row: int
    place: Place
    scores: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step.

    Args:
        token_ids: int32 ``[rows]``, on the logits' device, or on the host where the device chose them alone;
            NO_TOKEN where a row waits or failed.
        waiting: rows whose foreign processors were not ready.
        failures: errors of failed rows, by row: a SamplingError, or that of a foreign processor.
        logprobs: of rows with ``logprobs`` and a token, by row.
    """

    token_ids: torch.Tensor
    waiting: tuple[WaitingRow, ...] = ()
    failures: Mapping[int, Exception] = field(default_factory=dict)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)


@final
class PendingTokens:
    """Tokens of rows.

    Args:
        token_ids: integers ``[rows]``, on the device.
        sampled: the tokens on the host, with failures and log-probabilities; None: their copy is under way.

    Attributes:
        token_ids: the same.
    """

    def __init__(self, token_ids: torch.Tensor, sampled: SampledTokens | None) -> None:
        self.token_ids = token_ids
        self._sampled = sampled
        self._places: Sequence[Place] = ()
        self._words: torch.Tensor | None = None
        self._logprobs: LogprobColumns | None = None
        self._copied: torch.cuda.Event | None = None

    @classmethod
    def on_their_way(
        cls, words: torch.Tensor, places: Sequence[Place], logprobs: LogprobColumns | None = None
    ) -> "PendingTokens":
        """Begin to copy tokens to the host, which does not wait for the device to sample them.

        Args:
            words: int32 ``[2, rows]``: token ids, and the bits of each row's greatest score.
            places: the sequence of each row.
            logprobs: log-probabilities of some rows' tokens; None: no row has any.
        """
        pending = cls(words[0], None)
        pending._places = places
        # into pinned memory; complete once an event that is recorded after these calls is
        pending._words = words.to("cpu", non_blocking=True)
        if logprobs is not None:
            rows, counts, *columns = logprobs
            pending._logprobs = LogprobColumns(rows, counts, *(each.to("cpu", non_blocking=True) for each in columns))
        if words.is_cuda:
            pending._copied = torch.cuda.Event()
            pending._copied.record()
        return pending

    def wait(self) -> SampledTokens:
        """Wait until the copy is complete, and return the tokens on the host."""
        if self._sampled is None:
            assert self._words is not None, "tokens that are neither sampled nor being copied"
            if self._copied is not None:
                self._copied.synchronize()
            chosen = _without_failures(self._words[0], self._words[1].view(torch.float32), self._places)
            logprobs = {}
            if self._logprobs is not None:
                by_row = self._logprobs.by_row(chosen.token_ids[list(self._logprobs.rows)].tolist())
                logprobs = {row: each for row, each in by_row.items() if row not in chosen.failures}
            self._sampled = SampledTokens(chosen.token_ids, failures=chosen.failures, logprobs=logprobs)
        return self._sampled


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
        scores, requested = self._checked(logits, places)
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
        scores, requested = self._checked(logits, places)
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
        self._features_of([each.place for each in waiting])  # which also checks them
        device = waiting[0].scores.device if waiting else None
        answer = _Answer(torch.full((len(waiting),), NO_TOKEN, dtype=torch.int32, device=device))
        for index, each in enumerate(waiting):
            answer.apply_foreign_processors(index, each)
        return answer.sampled_tokens()

    def _checked(self, logits: torch.Tensor, places: Sequence[Place]) -> tuple[torch.Tensor, int]:
        """Check logits and sequences; return contiguous logits, and the enabled features that at least one row uses."""
        num_rows = len(places)
        if logits.dtype != torch.float32 or logits.shape != (num_rows, self.vocab_size):
            raise TensorError(
                f"logits of {num_rows} rows must be float32 [{num_rows}, {self.vocab_size}], "
                f"got {logits.dtype} {list(logits.shape)}"
            )
        return logits.detach().contiguous(), self._features_of(places)

    def _features_of(self, places: Sequence[Place]) -> int:
        """Return the enabled features that at least one row uses. Refuses sequences of another vocabulary."""
        features: int = Feature.NONE
        for row, place in enumerate(places):
            features |= place.sequence.features
            if place.sequence.vocab_size != self.vocab_size:
                raise ConfigurationError(
                    f"row {row} has a vocabulary of {place.sequence.vocab_size} tokens, and this sampler one of "
                    f"{self.vocab_size}"
                )
        return features & self._enabled


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
            (row, wish_of(place))
            for row, place in zip(rows, places, strict=True)
            if place.sequence.params.logprobs is not None and row not in self._failures
        ]
        if wanted:
            chosen_rows = [row for row, _ in wanted]
            token_ids = self._token_ids[torch.tensor(chosen_rows, device=self._token_ids.device)].tolist()
            logprobs = logprobs_of(tiles, chosen_rows, token_ids, [wish for _, wish in wanted])
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
            token_ids = chosen.token_ids.tolist()
            self._logprobs[row] = logprobs_of(tiled(waiting.logits), [0], token_ids, [wish_of(waiting.place)])[0]


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device. From pageable memory the host would wait until the device is done with earlier work."""
    if device.type != "cuda" or numbers.is_cuda:
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def features_of(places: Iterable[Place]) -> int:
    """Return the features that at least one row uses, as bits of :class:`Feature`."""
    features: int = Feature.NONE
    for place in places:
        features |= place.sequence.features
    return features


NO_IDS: Final = np.zeros(0, np.int64)


@final
class Adjustment:
    """The changes to one batch of scores. Cost: O(tokens that are changed), on the host and on the device.

    Args:
        scores: float32 ``[rows, vocabulary]``, contiguous; changed by :meth:`apply` until :meth:`undo`.
        places: the sequence of each row.
    """

    def __init__(self, scores: torch.Tensor, places: Sequence[Place]) -> None:
        self._flat = scores.view(-1)
        self._vocab_size = scores.shape[1]
        self._places = places
        self._undone: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_changed = False

    def apply(self, features: int) -> None:
        """Change the scores.

        Args:
            features: bits of at least all features that rows of the batch use; others are skipped.
        """
        if features & Feature.BIAS:
            self._add_bias()
        if features & Feature.PENALTIES:
            self._penalise()
        if features & Feature.BANS:
            self._ban()

    @property
    def has_changed(self) -> bool:
        """Whether a score was changed, also after it was put back."""
        return self._has_changed

    def undo(self) -> None:
        """Put back what was changed."""
        while self._undone:
            where, before = self._undone.pop()
            self._flat[where] = before

    def _add_bias(self) -> None:
        with_bias = self._asking(Feature.BIAS)
        where = self._where((row, place.sequence.bias_ids) for row, place in with_bias)
        bias = self._on_device(np.concatenate([place.sequence.bias_values for _, place in with_bias]))
        before = self._flat.index_select(0, where)
        self._write(where, before, before + bias)

    def _penalise(self) -> None:
        penalised = self._asking(Feature.PENALTIES)
        counted = [place.sequence.counts(place.drafts) for _, place in penalised]
        where = self._where((row, counts.token_ids) for (row, _), counts in zip(penalised, counted, strict=True))
        counts = self._on_device(np.concatenate([each.counts for each in counted]))
        params = [place.sequence.params for _, place in penalised]
        numbers = [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params]
        of_rows = np.array(numbers, np.float32).repeat([len(each.counts) for each in counted], axis=0)
        repetition, frequency, presence = self._on_device(np.ascontiguousarray(of_rows.T))
        before = self._flat.index_select(0, where)
        scores = torch.where(before < 0, before * repetition, before / repetition)
        scores -= frequency * counts
        scores -= presence * (counts > 0)
        self._write(where, before, scores)

    def _ban(self) -> None:
        banned = [(row, place.sequence.banned(place.drafts)) for row, place in self._asking(Feature.BANS)]
        where = self._where((row, np.array(tokens, np.int64)) for row, tokens in banned)
        before = self._flat.index_select(0, where)
        self._write(where, before, torch.full_like(before, -torch.inf))

    def _asking(self, feature: int) -> list[tuple[int, Place]]:
        return [(row, place) for row, place in enumerate(self._places) if place.sequence.features & feature]

    def _where(self, tokens_of_rows: Iterable[tuple[int, npt.NDArray[np.int64]]]) -> torch.Tensor:
        """Return the places of tokens of rows in the flat scores: int64."""
        flat = [row * self._vocab_size + tokens for row, tokens in tokens_of_rows]
        return self._on_device(np.concatenate([NO_IDS, *flat]))

    def _on_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return sent(torch.from_numpy(array), self._flat.device)

    def _write(self, where: torch.Tensor, before: torch.Tensor, scores: torch.Tensor) -> None:
        self._undone.append((where, before))
        self._has_changed = True
        self._flat[where] = scores


def beam_logprobs(logits: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """Give what beams are scored by, as transformers does: log-softmax, then bias, penalties and bans.

    Args:
        logits: float32 ``[beams, vocabulary]``; not changed.
        places: whose beams they are; foreign processors are not applied.

    Returns:
        float32 of the same shape.
    """
    scores = logits.log_softmax(dim=1)
    Adjustment(scores, places).apply(features_of(places))
    return scores


class Ahead(NamedTuple):
    """Tokens on the device.

    Args:
        words: int32 ``[2, rows]`` on the device: tokens, and the bits of each row's greatest score.
        logprobs: of the rows with ``logprobs``; None if there are none.
    """

    words: torch.Tensor
    logprobs: LogprobColumns | None


def choose_ahead(scores: torch.Tensor, places: Sequence[Place], features: int, kernels: ModuleType) -> Ahead:
    """Choose a token for every row, in the device's stream; the host does not wait.

    Args:
        scores: float32 ``[rows, vocabulary]``, contiguous; changed, and restored in the same stream.
        places: the sequence of each row, without foreign processors; at least one.
        features: bits of the features that rows use.
        kernels: the kernels of the scores' device.

    Cost: two passes over the scores, up to 32 more for rows with top-k and top-p, and noise for all drawn rows' tokens.
    """
    num_rows = len(places)
    draws, filters = _parameters(places, scores.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    greatest = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    adjustment = Adjustment(scores, places)
    try:
        adjustment.apply(features)
        if features & Feature.FILTERS:
            kernels.find_least(filters, scores, draws.least)
        kernels.draw_tokens(draws, scores, token_ids, greatest)
    finally:
        adjustment.undo()
    words = torch.stack([token_ids.int(), greatest.view(torch.int32)])
    if not features & Feature.LOGPROBS:
        return Ahead(words, None)
    rows = [row for row, place in enumerate(places) if place.sequence.params.logprobs is not None]
    wishes = [wish_of(places[row]) for row in rows]
    at = sent(torch.tensor(rows), scores.device)
    return Ahead(words, logprob_columns(tiled(scores), rows, at, token_ids[at].clamp(min=0), wishes))


def wish_of(place: Place) -> Wish:
    """Return what a row with ``logprobs`` tells beside its token."""
    params = place.sequence.params
    return tuple(params.logprob_token_ids) or params.logprobs or 0


def _parameters(places: Sequence[Place], device: torch.device) -> tuple[Draws, Filters]:
    """Send the rows' parameters to the device, as one copy; nothing is filtered yet."""
    num_rows = len(places)
    words = np.empty((6, num_rows), np.int64)
    top_p, floats = words[4].view(np.float64), words[5].view(np.float32)
    params = [place.sequence.params for place in places]
    words[0] = [place.sequence.seed for place in places]
    words[1] = [place.sequence.sample for place in places]
    words[2] = [place.sequence.position(place.drafts) for place in places]
    words[3] = [each.top_k for each in params]
    top_p[:] = [each.top_p for each in params]
    floats[:num_rows] = [each.temperature for each in params]
    floats[num_rows:] = [each.min_p for each in params]
    there = sent(torch.from_numpy(words), device)
    of_device = there[5].view(torch.float32)
    temperatures, min_p = of_device[:num_rows], of_device[num_rows:]
    least = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
    return (
        Draws(temperatures, least, there[0], there[1], there[2]),
        Filters(temperatures, there[3], there[4].view(torch.float64), min_p),
    )
