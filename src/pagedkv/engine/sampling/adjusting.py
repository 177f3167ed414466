"""From logits to adjusted scores, without a wait of the host for the device.

Copies of tensors between host and device that the host does not wait for, from and to pinned memory.

Changes of scores before a token is chosen: bias, penalties and bans, by the parameters of each row.

They concern few tokens of a row, so these scores are read, changed and written back in place, for all rows at once, in
the order of transformers: bias, repetition penalty, (presence and frequency, which it lacks,) bad words, minimum
length. :class:`Adjustment` keeps the old scores and restores them, so that the caller's logits are unchanged after
sampling, and log-probabilities can be computed from them.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.engine.sampling.sequence import Feature, SampledSequence

__all__ = ["Adjustment", "Place", "beam_logprobs", "features_of", "fetched", "sent"]


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device. From pageable memory the host would wait until the device is done with earlier work."""
    if device.type != "cuda" or numbers.is_cuda:
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def fetched(numbers: torch.Tensor) -> torch.Tensor:
    """Begin to copy numbers to the host. The copy is complete once an event that is recorded after this call is."""
    return numbers.to("cpu", non_blocking=True)  # into pinned memory


class Place(NamedTuple):
    """The sequence of a row of logits, with the drafts between its answer and the row.

    Args:
        sequence: the sequence.
        drafts: drafts after the answer that precede this row's position, not accepted yet.
    """

    sequence: SampledSequence
    drafts: Sequence[int] = ()


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
