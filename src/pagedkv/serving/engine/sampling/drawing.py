"""The token of each row: the greatest score, or the greatest of score / temperature + noise among those that are kept.

Noise is hashed only for tokens that may win. Where filters keep no more than a window of the greatest scores, these are
perturbed. Else each tile's greatest score and greatest hash bound what it can hold, and logarithms are taken only in
tiles whose bound exceeds what was found already. The answer is that of perturbing every token.
"""

from typing import Final

import torch

from pagedkv.serving.engine.sampling.noise import GREATEST_NOISE, gumbel, run_words, words
from pagedkv.serving.engine.sampling.tiles import TILE_SIZE, TiledScores, elements_at_once

__all__ = ["SLACK", "draw", "draw_from_window"]

SLACK: Final = 1e-9
"""Logarithms may be wrong by rounding, so a tile is left out only where its bound is less by this."""


NO_WORD: Final = -(2**63)
"""The least word: of tokens that are not kept."""


def draw_from_window(
    token_ids: torch.Tensor, scores: torch.Tensor, temperatures: torch.Tensor, least: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Draw one token for each row whose window holds all that is kept: as :func:`draw`, with less work.

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
        keys: int64 ``[n]``, of :func:`~pagedkv.serving.engine.sampling.noise.keys_of`.

    Returns:
        Token ids, int64 ``[n]``. Of tokens whose sums are equal, the one with the least id.

    Cost: O(tokens in tiles with a score that is kept). Memory: a bounded number of tokens at once, some numbers a tile.
    """
    maxima = tiles.maxima[rows]
    places, numbers = _worth_hashing(tiles, rows, maxima, temperatures, least, keys)
    num_at_once = max(1, elements_at_once(keys.device) // TILE_SIZE)
    is_filtered = bool((least > -torch.inf).any())
    greatest_words = [
        _greatest_word(tiles, rows, least if is_filtered else None, keys, (places[some], numbers[some]))
        for some in (slice(start, start + num_at_once) for start in range(0, len(places), num_at_once))
    ]
    bounds = gumbel(torch.cat(greatest_words)) + maxima[places, numbers].double() / temperatures[places].double()
    best = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=keys.device)
    best.scatter_reduce_(0, places, bounds, "amax")
    # The tile with the greatest bound holds something; what it holds is what others must be able to exceed.
    first = torch.zeros_like(rows)
    is_best = bounds == best[places]
    first[places[is_best]] = numbers[is_best]
    everyone = torch.arange(len(rows), device=keys.device)
    sums, tokens = _perturbed(tiles, rows, temperatures, least, keys, (everyone, first))
    others = ((bounds > sums[places] - SLACK) & (numbers != first[places])).nonzero()[:, 0]
    if len(others):
        pairs = places[others], numbers[others]
        their_sums, their_tokens = _perturbed(tiles, rows, temperatures, least, keys, pairs)
        tokens = _greatest(torch.cat([sums, their_sums]), torch.cat([tokens, their_tokens]), everyone, pairs[0])
    return tokens


def _worth_hashing(
    tiles: TiledScores,
    rows: torch.Tensor,
    maxima: torch.Tensor,
    temperatures: torch.Tensor,
    least: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the tiles that may hold the winner: places in ``rows``, and numbers of tiles.

    The tile with the greatest score is perturbed at once: noise is bounded, so tiles far below that are out.
    """
    top = maxima.argmax(dim=1)
    everyone = torch.arange(len(rows), device=rows.device)
    sums, _ = _perturbed(tiles, rows, temperatures, least, keys, (everyone, top))
    reach = ((sums - GREATEST_NOISE - SLACK) * temperatures).float()
    reach -= reach.abs() * 1e-6  # float32 rounds
    # "Not below" rather than "at least": a row of NaN keeps its tiles, and fails elsewhere with words of ours.
    places, numbers = (~(maxima < torch.maximum(least, reach)[:, None])).nonzero(as_tuple=True)
    return places, numbers


def _greatest_word(
    tiles: TiledScores,
    rows: torch.Tensor,
    least: torch.Tensor | None,
    keys: torch.Tensor,
    pairs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Hash whole tiles and take the greatest word of each, of tokens that are kept: int64, as many as tiles."""
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
    """Perturb the tokens of tiles: the greatest sum of each tile, float64, and its token's id."""
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


def _greatest(sums: torch.Tensor, tokens: torch.Tensor, everyone: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Take each place's token with the greatest sum: ``sums`` and ``tokens`` are everyone's, then those of places."""
    owners = torch.cat([everyone, places])
    best = torch.full((len(everyone),), -torch.inf, dtype=torch.float64, device=sums.device)
    best.scatter_reduce_(0, owners, sums, "amax")
    is_best = sums == best[owners]
    ids = torch.full((len(everyone),), torch.iinfo(torch.int64).max, device=sums.device)
    return ids.scatter_reduce_(0, owners[is_best], tokens[is_best], "amin")
