"""Which tokens may be drawn, as one number a row: the least score that is kept.

Top-k, top-p and min-p each keep a row's greatest scores, so each is a threshold, and together they are the greatest of
three. No mask is made and no vocabulary is sorted, as long as what is kept is among the :data:`WINDOW` greatest.

The order is that of transformers: temperature, top-k, top-p over what top-k left, min-p over what both left. Scores are
never divided by the temperature where they stand, only where their probabilities are needed. Equal scores share a
fate: all that equal the last one are kept, where transformers keeps, by top-p, those that its sort put last. So a
result hangs on no sort's order, and on no place in the batch.
"""

from typing import Final, NamedTuple

import torch

from pagedkv.engine.sampling.tiles import TiledScores, elements_at_once, sorted_down

__all__ = ["WINDOW", "Filters", "log_mass", "thresholds"]

WINDOW: Final = 64
"""How many of the greatest scores are looked at first; where they do not suffice the whole row is sorted."""


class Filters(NamedTuple):
    """The filters of rows, each array ``[rows]`` and on the scores' device.

    Args:
        rows: int64, their places in the scores.
        temperatures: float32, above 0.
        top_k: int64, 0 keeps all; top_p: float64, 1 keeps all; min_p: float32, 0 keeps all.
    """

    rows: torch.Tensor
    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def thresholds(tiles: TiledScores, filters: Filters, window: torch.Tensor) -> torch.Tensor:
    """Find the least score that each row keeps: float32 ``[rows]``, -inf where all are kept.

    Args:
        tiles: scores; filters: of some rows.
        window: float32 ``[rows, n]``, the greatest scores of these rows, the greatest first; WINDOW of them, or all.

    Cost: with top-p one pass over the row's scores; rows that keep more than the window are sorted.
    """
    is_filtered = filters.min_p > 0
    of_min_p = window[:, 0] + filters.temperatures * torch.log(filters.min_p.clamp(min=1e-38))
    least = of_min_p.masked_fill_(~is_filtered, -torch.inf)
    chosen = ((filters.top_k > 0) | (filters.top_p < 1)).nonzero()[:, 0]
    if len(chosen):
        least[chosen] = torch.maximum(least[chosen], _of_top(tiles, filters, window, chosen))
    return least


def _of_top(tiles: TiledScores, filters: Filters, window: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Find thresholds by top-k and top-p, of chosen rows: in the window, and where it is too small in all."""
    rows, window = filters.rows[chosen], window[chosen]
    temperatures, top_k, top_p = filters.temperatures[chosen], filters.top_k[chosen], filters.top_p[chosen]
    vocab_size = tiles.scores.shape[1]
    top_k = torch.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
    # The mass that probabilities are parts of is that of the row, unless top-k leaves less.
    of_all = ((top_k == vocab_size) & (top_p < 1)).nonzero()[:, 0]
    mass = torch.full_like(top_p, torch.nan)
    mass[of_all] = log_mass(tiles, rows[of_all], temperatures[of_all])
    least, is_found = _of_sorted(window, temperatures, top_k, top_p, mass)
    if window.shape[1] < vocab_size:
        for place in (~is_found).nonzero()[:, 0].tolist():
            one = slice(place, place + 1)
            everything = sorted_down(tiles.scores[rows[one]])
            least[one], _ = _of_sorted(everything, temperatures[one], top_k[one], top_p[one], mass[one])
    return least


def _of_sorted(
    values: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, mass: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find thresholds in scores that are sorted, the greatest first.

    Args:
        values: float32 ``[rows, count]``, the greatest of each row.
        temperatures, top_k, top_p: of the rows.
        mass: float64, log of the sum that probabilities are parts of; NaN where it is that of what top-k leaves.

    Returns:
        Thresholds, and whether they are right: what they rest on lies inside of ``values``.
    """
    count = values.shape[1]
    of_top_k = values.gather(1, top_k.clamp(max=count)[:, None] - 1)[:, 0]
    has_top_p = top_p < 1
    if not bool(has_top_p.any()):
        return of_top_k, top_k <= count
    scaled = values.double().div_(temperatures[:, None])
    is_known = ~mass.isnan()
    if not bool(is_known.all()):
        of_left = scaled.masked_fill(values < of_top_k[:, None], -torch.inf).logsumexp(dim=1)
        mass = torch.where(is_known, mass, of_left)
    summed = scaled.sub_(mass[:, None]).exp_().cumsum(dim=1)
    num_before = torch.searchsorted(summed, top_p[:, None])[:, 0]  # sums that are less: the token behind them is kept
    of_top_p = values.gather(1, num_before.clamp(max=count - 1)[:, None])[:, 0]
    least = torch.where(has_top_p, torch.maximum(of_top_p, of_top_k), of_top_k)
    # Top-p alone needs a sum that reaches it; behind top-k, all of what that leaves, equals of its last one included.
    is_found = torch.where(
        is_known, num_before < count, torch.where(has_top_p, values[:, -1] < of_top_k, top_k <= count)
    )
    return least, is_found


def log_mass(tiles: TiledScores, rows: torch.Tensor, temperatures: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the exponentials of rows' scores, each divided by its temperature: logarithms, float64 ``[rows]``.

    Exponentials are float32. Memory: a bounded number of scores at once.
    """
    device = tiles.scores.device
    factors = torch.ones(len(rows), device=device) if temperatures is None else 1 / temperatures
    greatest = tiles.maxima[rows].amax(dim=1)
    num_at_once = max(1, elements_at_once(device) // max(1, tiles.scores.shape[1]))
    sums = [torch.zeros(0, dtype=torch.float64, device=device)]
    for start in range(0, len(rows), num_at_once):
        some = slice(start, start + num_at_once)
        # A lone row is looked at where it stands, several are copied.
        scores = tiles.scores[rows[some]] if num_at_once > 1 else tiles.scores[int(rows[start])][None]
        sums.append(scores.sub(greatest[some, None]).mul_(factors[some, None]).exp_().sum(dim=1).double())
    return torch.cat(sums).log() + greatest.double() * factors.double()
