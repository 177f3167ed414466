"""WholeBlocks: blocks of all heads, put together from those of the ranks, and cut into them. Bytes only.

A block of a group with keys and values has, for each layer, the keys of all its tokens and then their values, and each
token's heads one after another. So the heads of a rank are a slice of one axis::

    whole block    layer 0 keys [tokens, heads, bytes of a key] | values [tokens, heads, bytes of a value] | layer 1 ...
    of a rank                           `-- its heads

:mod:`~pagedkv.contract.head_slices` has the slices. Latents and states have no heads: they are whole on
each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never, final

import numpy as np

from pagedkv.contract.head_slices import head_slices, heads_of_rank
from pagedkv.device import GroupShape, KeyValueShape, LatentShape, StateShape
from pagedkv.tiers.entry_blocks import Rows

__all__ = ["WholeBlocks"]


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes of a block with heads: layers, tokens, and bytes of a head's key and value."""

    num_layers: int
    block_size: int
    head_nbytes: tuple[int, int]

    def parts(self, rows: Rows, num_heads: int) -> list[Rows]:
        """Return the keys and the values of blocks: views of ``[blocks, layers, tokens, heads, bytes]``."""
        by_layer = rows.reshape(len(rows), self.num_layers, -1)
        parts, begin = [], 0
        for nbytes in self.head_nbytes:
            end = begin + self.block_size * num_heads * nbytes
            shape = (len(rows), self.num_layers, self.block_size, num_heads, nbytes)
            parts.append(by_layer[:, :, begin:end].reshape(shape))  # an axis is split: a view
            begin = end
        return parts


@final
class WholeBlocks:
    """The blocks of one group on a number of ranks.

    Args:
        shape: of a block with all heads; block_size: its tokens.
        num_ranks: number of ranks.

    Attributes:
        nbytes: bytes of a whole block; rank_nbytes: of a rank's.
        sources: the ranks that have every head between them, each head once.

    Raises:
        ConfigurationError: the heads cannot be shared out to so many ranks.
    """

    def __init__(self, shape: GroupShape, block_size: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.nbytes = shape.block_nbytes(block_size)
        self._num_heads: int | None = None
        match shape:
            case KeyValueShape():
                key_dim, value_dim = shape.dims
                size = shape.dtype.itemsize
                self._axes = _Axes(shape.num_layers, block_size, (key_dim * size, value_dim * size))
                self._num_heads = shape.num_heads
                self._width = heads_of_rank(shape.num_heads, num_ranks, 0).count
                self.rank_nbytes = self.nbytes // shape.num_heads * self._width
            case LatentShape() | StateShape():
                self.rank_nbytes = self.nbytes
            case _:
                assert_never(shape)
        self._gathered = head_slices(self._num_heads, num_ranks, 1, 0)
        self.sources: Sequence[int] = tuple(dict.fromkeys(each.source_rank for each in self._gathered))

    def put(self, whole: Rows, rank: int, rows: Rows) -> None:
        """Copy the heads of a rank in :attr:`sources` into whole blocks.

        Args:
            whole: uint8 ``[n, nbytes]``; rank: whose; rows: uint8 ``[n, rank_nbytes]``.
        """
        if self._num_heads is None:
            whole[...] = rows
            return
        for target, source in zip(
            self._axes.parts(whole, self._num_heads), self._axes.parts(rows, self._width), strict=True
        ):
            for each in self._gathered:
                if each.source_rank == rank:
                    heads = source[:, :, :, each.source_head : each.source_head + each.count]
                    target[:, :, :, each.target_head : each.target_head + each.count] = heads

    def cut(self, whole: Rows, rank: int) -> Rows:
        """Return the blocks of a rank, uint8 ``[n, rank_nbytes]``: a copy of its heads, or the blocks as given."""
        if self._num_heads is None:
            return whole
        rows = np.empty((len(whole), self.rank_nbytes), np.uint8)
        for source, target in zip(
            self._axes.parts(whole, self._num_heads), self._axes.parts(rows, self._width), strict=True
        ):
            for each in head_slices(self._num_heads, 1, self._num_ranks, rank):
                heads = source[:, :, :, each.source_head : each.source_head + each.count]
                target[:, :, :, each.target_head : each.target_head + each.count] = heads
        return rows
