"""From adjusted scores to tokens: for each row the one with the greatest score / temperature + noise that filters keep.

Scores are looked up by tiles of 128 tokens. The greatest scores of a row lie in the tiles with the greatest maxima, so
a few of a vocabulary's 128,000 scores are found by reading a thousand maxima and some tiles. The maxima take one pass
at the speed of memory; torch's ``argmax`` takes several times as long on a CPU, and its ``topk`` longer::

    scores[row]  | tile 0: 128 tokens | tile 1 | ... | last tile, perhaps shorter |
    maxima[row]  | greatest           | ...

Noise is Gumbel noise without a state: a hash of seed, sample, position and token id. The index of the greatest
``logit / temperature + noise`` is a sample of the softmax (E. J. Gumbel, *Statistical Theory of Extreme Values*, 1954;
C. J. Maddison, D. Tarlow, T. Minka, "A* Sampling", 2014, section 2). Since the noise depends on these four numbers
alone, a request draws the same tokens in any batch, after any preemption, and for any number of positions that one step
samples. Two machines may draw different tokens only if the difference between the two greatest sums is smaller than the
rounding differences of their logits.

The hash is SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014, section 3, with the constants of its final version): a counter, and a mixing function::

    key(seed, sample, position) = word(word(word(seed, 0), sample), position)
    word(key, counter)          = mix(key + (counter + 1) * GAMMA)

so the words of a position's tokens are the stream of SplitMix64 seeded with its key. The arithmetic is int64 with
wrap-around, so every device computes the same bits.

Filters are one number a row: the least score that is kept. Top-k, top-p and min-p each keep a row's greatest scores, so
each is a threshold, and together they are the greatest of three. No mask is made and no vocabulary is sorted, as long
as what is kept is among the :data:`WINDOW` greatest.

The order is that of transformers: temperature, top-k, top-p over what top-k left, min-p over what both left. Scores are
never divided by the temperature where they stand, only where their probabilities are needed. Equal scores share a
fate: all that equal the last one are kept, where transformers keeps, by top-p, those that its sort put last. So a
result hangs on no sort's order, and on no place in the batch.

Noise is computed only for tokens that may win. If the filters keep no more than a window of the greatest scores, these
tokens are perturbed. Otherwise the greatest score and the greatest hash of a tile give an upper bound of its sums, and
logarithms are computed only in tiles whose bound exceeds the best sum so far. The result is the same as if every token
were perturbed.
"""

from typing import Final, NamedTuple

import numpy as np
import torch

TILE_SIZE: Final = 128
ELEMENTS_ON_CPU: Final = 2**15
ELEMENTS_ON_DEVICE: Final = 2**25


class TiledScores(NamedTuple):
    """Scores with their tiles.

    Args:
        scores: float32 ``[rows, vocabulary]``, contiguous.
        maxima: float32 ``[rows, tiles]``: the greatest score of each tile.
        tail: float32 ``[rows, TILE_SIZE]``: the last tile filled up with -inf, where it is shorter than others; or
            ``[rows, 0]``.
    """

    scores: torch.Tensor
    maxima: torch.Tensor
    tail: torch.Tensor

    def of_tiles(self, rows: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Read whole tiles; rows and tiles are int64, of shapes that broadcast.

        Returns:
            Scores of that shape with TILE_SIZE behind it, -inf past the vocabulary's end. The token in place i of a
            tile is ``tile * TILE_SIZE + i``.
        """
        num_whole = self.scores.shape[1] // TILE_SIZE
        if not num_whole:
            return self.tail[rows].expand(*torch.broadcast_shapes(rows.shape, tiles.shape), TILE_SIZE)
        whole = self.scores[:, : num_whole * TILE_SIZE].unflatten(1, (num_whole, TILE_SIZE))
        values: torch.Tensor = whole[rows, tiles.clamp(max=num_whole - 1)]
        if self.tail.shape[1]:
            values = torch.where((tiles == num_whole)[..., None], self.tail[rows], values)
        return values

    def argmax(self, rows: torch.Tensor) -> torch.Tensor:
        """Find the first of the greatest scores of each of these rows: int64 ids."""
        tiles = self.maxima[rows].argmax(dim=1)
        return tiles * TILE_SIZE + self.of_tiles(rows, tiles).argmax(dim=1)

    def largest(self, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the ``count`` greatest scores of each of these rows, the greatest first: ids int64, scores float32.

        Which of equal scores come first, or at all, is not said. Cost: O(tiles + count * TILE_SIZE) a row.
        """
        count = min(count, self.scores.shape[1])
        num_tiles = min(count, self.maxima.shape[1])
        tiles = self.maxima[rows].topk(num_tiles, dim=1, sorted=False).indices
        values, places = self.of_tiles(rows[:, None], tiles).flatten(1).topk(count, dim=1)
        return tiles.gather(1, places // TILE_SIZE) * TILE_SIZE + places % TILE_SIZE, values


def tiled(scores: torch.Tensor) -> TiledScores:
    """Take the maxima of scores float32 ``[rows, vocabulary]``, which are contiguous. Cost: one pass.

    A tile that has a NaN has NaN as its maximum.
    """
    num_rows, vocab_size = scores.shape
    num_whole, num_left = divmod(vocab_size, TILE_SIZE)
    end = num_whole * TILE_SIZE
    maxima = scores.new_empty(num_rows, 0)
    if num_whole:
        maxima = scores[:, :end].unflatten(1, (num_whole, TILE_SIZE)).amax(dim=2)
    if not num_left:
        return TiledScores(scores, maxima, scores.new_empty(num_rows, 0))
    tail = scores.new_full((num_rows, TILE_SIZE), -torch.inf)
    tail[:, :num_left] = scores[:, end:]
    return TiledScores(scores, torch.cat([maxima, tail.amax(dim=1, keepdim=True)], dim=1), tail)


def elements_at_once(device: torch.device) -> int:
    """Return the scores of which temporary copies are made at a time: a CPU's cache, or a part of a GPU's memory."""
    return ELEMENTS_ON_CPU if device.type == "cpu" else ELEMENTS_ON_DEVICE


def sorted_down(values: torch.Tensor) -> torch.Tensor:
    """Sort each row, the greatest first; on a CPU by NumPy: 0.6 ms for 128k, where torch, which sorts ids, takes 19."""
    if values.device.type == "cpu":
        return torch.from_numpy(-np.sort(-values.numpy(), axis=1))
    return values.sort(dim=1, descending=True).values


GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR: Final = 0x94D049BB133111EB - 2**64
"""The constants of SplitMix64, as signed integers, for tensors of int64."""
UNUSED_BITS: Final = 12
"""52 bits of a word are used: float64 has the middle of each interval exactly, so no logarithm is taken of 0 or 1."""
GREATEST_NOISE: Final = 36.75
"""No noise is above this: -log(-log(1 - 2**-53)) is 36.74."""


def words(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Hash keys and counters, int64 each: int64 of their broadcast shape.

    Cost: eleven passes over the result. Memory: a second array of its size.
    """
    return _mix_(keys + (counters + 1) * GAMMA)


def seed_of(seed: int, number: int) -> int:
    """Derive the seed of request ``number`` from one seed for many requests: 0 to 2**63 - 1."""
    word = int(words(torch.tensor([seed], dtype=torch.int64), torch.tensor([number], dtype=torch.int64))[0])
    return word & (2**63 - 1)


def run_words(keys: torch.Tensor, firsts: torch.Tensor, length: int) -> torch.Tensor:
    """Hash runs of ``length`` counters; keys and first counters: int64 ``[n]``.

    Returns words, int64 ``[n, length]``. Cost: that of :func:`words`.
    """
    steps = torch.arange(1, length + 1, device=keys.device) * GAMMA
    return _mix_((keys + firsts * GAMMA)[:, None] + steps)


def _mix_(word: torch.Tensor) -> torch.Tensor:
    """Mix words in place. Torch's right shift of signed integers copies the sign bit, so these bits are masked out."""
    shifted = torch.empty_like(word)
    for count, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR), (31, 1)):
        torch.bitwise_right_shift(word, count, out=shifted)
        word ^= shifted.bitwise_and_((1 << (64 - count)) - 1)
        if factor != 1:
            word *= factor
    return word


def keys_of(seeds: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute the key of each row from seeds, samples and positions; all are int64 ``[rows]``."""
    return words(words(words(seeds, torch.zeros_like(seeds)), samples), positions)


def gumbel(word: torch.Tensor) -> torch.Tensor:
    """Turn words into standard Gumbel noise, float64. Noise grows with the word, up to rounding."""
    uniform = ((word >> UNUSED_BITS).double() + (2.0**51 + 0.5)) * 2.0**-52
    return -torch.log(-torch.log(uniform))


WINDOW: Final = 64
"""How many of the greatest scores are looked at first; where they do not suffice the whole row is sorted."""


class RowFilters(NamedTuple):
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


def thresholds(tiles: TiledScores, filters: RowFilters, window: torch.Tensor) -> torch.Tensor:
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


def _of_top(tiles: TiledScores, filters: RowFilters, window: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
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
    factors = torch.ones(len(rows), dtype=torch.float32, device=device) if temperatures is None else 1 / temperatures
    greatest = tiles.maxima[rows].amax(dim=1)
    num_at_once = max(1, elements_at_once(device) // max(1, tiles.scores.shape[1]))
    sums = [torch.zeros(0, dtype=torch.float64, device=device)]
    for start in range(0, len(rows), num_at_once):
        some = slice(start, start + num_at_once)
        # A lone row is looked at where it stands, several are copied.
        scores = tiles.scores[rows[some]] if num_at_once > 1 else tiles.scores[int(rows[start])][None]
        sums.append(scores.sub(greatest[some, None]).mul_(factors[some, None]).exp_().sum(dim=1).double())
    return torch.cat(sums).log() + greatest.double() * factors.double()


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
        keys: int64 ``[n]``, of :func:`~pagedkv.engine.sampling.drawing.keys_of`.

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
