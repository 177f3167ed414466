"""Draws a token for each row: the one with the greatest score / temperature + noise, among those that filters keep.

Noise is computed only for tokens that may win. If the filters keep no more than a window of the greatest scores, these
tokens are perturbed. Otherwise the greatest score and the greatest hash of a tile give an upper bound of its sums, and
logarithms are computed only in tiles whose bound exceeds the best sum so far. The result is the same as if every token
were perturbed.
"""

from typing import Final

import torch

from pagedkv.engine.sampling.noise import GREATEST_NOISE, gumbel, run_words, words
from pagedkv.engine.sampling.tiles import TILE_SIZE, TiledScores, elements_at_once

__all__ = ["SLACK", "draw", "draw_from_window"]

SLACK: Final = 1e-9
"""A tile is skipped only if its bound is lower than the best sum by this, since logarithms are rounded."""


NO_WORD: Final = -(2**63)
"""The least word, for tokens that filters remove."""


def draw_from_window(
    token_ids: torch.Tensor, scores: torch.Tensor, temperatures: torch.Tensor, least: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Draw one token for each row whose window has all that its filters keep: as :func:`draw`, at less cost.

    Args:
        token_ids: int64 ``[n, window]``; scores: float32 of the same shape.
        temperatures, least, keys: as in :func:`draw`.
    """
    noise = gumbel(words(keys[:, None], token_ids))
    perturbed = noise.add_(scores.double().div_(temperatures[:, None].double()))
    perturbed.masked_fill_(scores < least[:, None], -torch.inf)
    return token_ids.gather(1, perturbed.argmax(dim=1, keepdim=True))[:, 0]


def draw(
    tiles: TiledScores, rows: torch.Tensor, temperatures: torch.Tensor, least: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Draw one token for each row.

    Args:
        tiles: scores and their maxima.
        rows: int64 ``[n]``, places in the scores.
        temperatures: float32 ``[n]``, above 0; least: float32 ``[n]``, scores below it are not drawn.
        keys: int64 ``[n]``, of :func:`~pagedkv.engine.sampling.noise.keys_of`.

    Returns:
        Token ids, int64 ``[n]``; among equal sums, the least id.

    Cost: O(tokens in tiles with a score that filters keep). Memory: a bounded number of tokens at a time, and a few
    numbers for each tile.
    """
    maxima = tiles.maxima[rows]
    places, numbers = _candidate_tiles(tiles, rows, maxima, temperatures, least, keys)
    num_at_once = max(1, elements_at_once(keys.device) // TILE_SIZE)
    is_filtered = bool((least > -torch.inf).any())
    greatest_words = [
        _greatest_word(tiles, rows, least if is_filtered else None, keys, (places[some], numbers[some]))
        for some in (slice(start, start + num_at_once) for start in range(0, len(places), num_at_once))
    ]
    bounds = gumbel(torch.cat(greatest_words)) + maxima[places, numbers].double() / temperatures[places].double()
    best = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=keys.device)
    best.scatter_reduce_(0, places, bounds, "amax")
    # The best sum of the tile with the greatest bound is what the bounds of other tiles must exceed.
    first = torch.zeros_like(rows)
    is_best = bounds == best[places]
    first[places[is_best]] = numbers[is_best]
    all_rows = torch.arange(len(rows), device=keys.device)
    sums, tokens = _perturbed(tiles, rows, temperatures, least, keys, (all_rows, first))
    others = ((bounds > sums[places] - SLACK) & (numbers != first[places])).nonzero()[:, 0]
    if len(others):
        pairs = places[others], numbers[others]
        their_sums, their_tokens = _perturbed(tiles, rows, temperatures, least, keys, pairs)
        tokens = _greatest(torch.cat([sums, their_sums]), torch.cat([tokens, their_tokens]), all_rows, pairs[0])
    return tokens


def _candidate_tiles(
    tiles: TiledScores,
    rows: torch.Tensor,
    maxima: torch.Tensor,
    temperatures: torch.Tensor,
    least: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the tiles that may have the token to be drawn: places in ``rows``, and numbers of tiles.

    The tile with the greatest score is perturbed first. Noise is bounded, so tiles far below its best sum are excluded.
    """
    top = maxima.argmax(dim=1)
    all_rows = torch.arange(len(rows), device=rows.device)
    sums, _ = _perturbed(tiles, rows, temperatures, least, keys, (all_rows, top))
    reach = ((sums - GREATEST_NOISE - SLACK) * temperatures).float()
    reach -= reach.abs() * 1e-6  # float32 rounds
    # "Not below" rather than "at least": a row of NaN keeps its tiles, so that choosing.py can report it.
    places, numbers = (~(maxima < torch.maximum(least, reach)[:, None])).nonzero(as_tuple=True)
    return places, numbers


def _greatest_word(
    tiles: TiledScores,
    rows: torch.Tensor,
    least: torch.Tensor | None,
    keys: torch.Tensor,
    pairs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Hash whole tiles; return the greatest word of each tile, of tokens that filters keep: int64 ``[tiles]``."""
    places, numbers = pairs
    hashed = run_words(keys[places], numbers * TILE_SIZE, TILE_SIZE)
    if least is not None:
        hashed.masked_fill_(tiles.of_tiles(rows[places], numbers) < least[places, None], NO_WORD)
    return hashed.amax(dim=1)


def _perturbed(
    tiles: TiledScores,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    least: torch.Tensor,
    keys: torch.Tensor,
    pairs: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Perturb the tokens of tiles; return the greatest sum of each tile, float64, and its token's id."""
    places, numbers = pairs
    num_at_once = max(1, elements_at_once(keys.device) // TILE_SIZE)
    sums, ids = [], []
    for start in range(0, len(places), num_at_once):
        some, of_tile = places[start : start + num_at_once], numbers[start : start + num_at_once]
        values = tiles.of_tiles(rows[some], of_tile)
        noise = gumbel(run_words(keys[some], of_tile * TILE_SIZE, TILE_SIZE))
        perturbed = noise.add_(values.double().div_(temperatures[some, None].double()))
        perturbed.masked_fill_(values < least[some, None], -torch.inf)
        greatest, where = perturbed.max(dim=1)
        sums.append(greatest)
        ids.append(of_tile * TILE_SIZE + where)
    return torch.cat(sums), torch.cat(ids)


def _greatest(sums: torch.Tensor, tokens: torch.Tensor, all_rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return each row's token with the greatest sum: ``sums`` and ``tokens`` are of all rows, then of ``places``."""
    owners = torch.cat([all_rows, places])
    best = torch.full((len(all_rows),), -torch.inf, dtype=torch.float64, device=sums.device)
    best.scatter_reduce_(0, owners, sums, "amax")
    is_best = sums == best[owners]
    ids = torch.full((len(all_rows),), torch.iinfo(torch.int64).max, device=sums.device)
    return ids.scatter_reduce_(0, owners[is_best], tokens[is_best], "amin")
