"""Scores of many rows, and the greatest of each tile of 128 tokens: where to look, without looking everywhere.

The greatest scores of a row lie in the tiles with the greatest maxima, so a few of a vocabulary's 128,000 scores are
found by reading a thousand maxima and some tiles. The maxima take one pass at the speed of memory; torch's ``argmax``
takes several times as long on a CPU, and its ``topk`` longer.

::

    scores[row]  | tile 0: 128 tokens | tile 1 | ... | last tile, perhaps shorter |
    maxima[row]  | greatest           | ...
"""

from typing import Final, NamedTuple

import numpy as np
import torch

from pagedkv.errors import TensorError

__all__ = ["TILE_SIZE", "TiledScores", "as_scores", "elements_at_once", "sorted_down", "tiled"]

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


def as_scores(logits: torch.Tensor, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Check logits and make them contiguous.

    Raises:
        TensorError: not float32 ``[num_rows, vocab_size]``.
    """
    if logits.dtype != torch.float32 or logits.shape != (num_rows, vocab_size):
        raise TensorError(
            f"logits of {num_rows} rows must be float32 [{num_rows}, {vocab_size}], "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    return logits.detach().contiguous()


def elements_at_once(device: torch.device) -> int:
    """Return the scores of which temporary copies are made at a time: a CPU's cache, or a part of a GPU's memory."""
    return ELEMENTS_ON_CPU if device.type == "cpu" else ELEMENTS_ON_DEVICE


def sorted_down(values: torch.Tensor) -> torch.Tensor:
    """Sort each row, the greatest first; on a CPU by NumPy: 0.6 ms for 128k, where torch, which sorts ids, takes 19."""
    if values.device.type == "cpu":
        return torch.from_numpy(-np.sort(-values.numpy(), axis=1))
    return values.sort(dim=1, descending=True).values
