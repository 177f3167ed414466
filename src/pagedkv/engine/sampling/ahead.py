"""Sampling on the device without a wait of the host, which can schedule the next step meanwhile.

The rules and the noise are those of ``choosing``, by other kernels: thresholds are found without sorting, and every
token is perturbed, since the lengths of lists of candidates would be known on the device alone::

    scores [rows, vocabulary]
      bias, penalties, bans        written in place, and undone after the rest                 (adjusting)
      find_least, draw_tokens      of all rows at once, greedy ones among them                 (device.kernels)
      greatest score               shows why a row has no token
      log-probabilities            of the unchanged logits                                     (logprobs)
    words int32 [2, rows]          copied to the host                                          (pending)

Parameters are sent as one array of 64-bit words::

    [6, rows]   seeds | samples | positions | top_k | top_p, float64 | temperatures and min_p, float32
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from pagedkv.device import Draws, Filters
from pagedkv.engine.sampling.adjusting import Adjustment, Place, sent
from pagedkv.engine.sampling.drawing import tiled
from pagedkv.engine.sampling.logprobs import LogprobColumns, logprob_columns
from pagedkv.engine.sampling.sequence import Feature

__all__ = ["Ahead", "choose_ahead"]


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
    adjustment = Adjustment(scores, places)
    try:
        adjustment.apply(features)
        if features & Feature.FILTERS:
            kernels.find_least(filters, scores, draws.least)
        kernels.draw_tokens(draws, scores, token_ids)
        greatest = scores.amax(dim=1)
    finally:
        adjustment.undo()
    words = torch.stack([token_ids.int(), greatest.view(torch.int32)])
    if not features & Feature.LOGPROBS:
        return Ahead(words, None)
    rows = [row for row, place in enumerate(places) if place.sequence.params.logprobs is not None]
    counts = [places[row].sequence.params.logprobs or 0 for row in rows]
    at = sent(torch.tensor(rows), scores.device)
    return Ahead(words, logprob_columns(tiled(scores), rows, at, token_ids[at].clamp(min=0), counts))


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
    least = torch.full((num_rows,), -torch.inf, device=device)
    return (
        Draws(temperatures, least, there[0], there[1], there[2]),
        Filters(temperatures, there[3], there[4].view(torch.float64), min_p),
    )
