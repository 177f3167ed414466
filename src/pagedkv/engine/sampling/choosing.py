"""Chooses tokens from adjusted scores: for greedy rows, and with temperature, filters and noise for drawn rows.

The parameters of many requests become columns, so that all rows of one kind are computed together. A row whose greatest
score is not finite gets no token and fails; the other rows do not.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from pagedkv.engine.sampling.adjusting import Place
from pagedkv.engine.sampling.drawing import draw, draw_from_window
from pagedkv.engine.sampling.noise import keys_of
from pagedkv.engine.sampling.sequence import Feature
from pagedkv.engine.sampling.thresholds import WINDOW, Filters, thresholds
from pagedkv.engine.sampling.tiles import TiledScores, tiled
from pagedkv.errors import SamplingError

__all__ = ["NO_TOKEN", "Chosen", "choose", "choose_greatest", "chosen_of_words", "greatest_words", "kept_least"]

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
    return chosen_of_words(greatest_words(scores).cpu(), places)


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


def chosen_of_words(words: torch.Tensor, places: Sequence[Place]) -> Chosen:
    """Return the tokens of what :func:`greatest_words` returned, copied to the host."""
    return _without_failures(words[0], words[1].view(torch.float32), places)


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


def _filters(rows: torch.Tensor, places: Sequence[Place]) -> Filters:
    """Put the parameters of rows into columns, with a temperature of 1 for a greedy row."""
    params = [place.sequence.params for place in places]
    device = rows.device
    return Filters(
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
