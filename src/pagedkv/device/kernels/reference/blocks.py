"""Whole blocks in plain torch: copied from one pool's memory to another's, or zeroed."""

from collections.abc import Iterator

import torch

from pagedkv.device.layout import Pieces

__all__ = ["copy_blocks", "zero_blocks"]


def copy_blocks(  # noqa: PLR0913, PLR0917 - memory, ids and pieces of source and destination
    source: torch.Tensor,
    source_pieces: Pieces,
    source_ids: torch.Tensor,
    destination: torch.Tensor,
    destination_pieces: Pieces,
    destination_ids: torch.Tensor,
) -> None:
    """Copy block ``source_ids[i]`` to block ``destination_ids[i]``, for all i at once.

    Args:
        source, destination: uint8, memory of a pool; equal if blocks are copied within one pool.
        source_pieces, destination_pieces: the pieces of a block of source and destination, in bytes; equal in total.
        source_ids, destination_ids: int32 ``[n]``; destinations are distinct, and none is a source.

    Cost: O(bytes).
    """
    if len(source_ids) == 0:
        return
    content = torch.cat([piece[source_ids.long()] for piece in _pieces_of(source, source_pieces)], dim=1)
    at = 0
    for piece in _pieces_of(destination, destination_pieces):
        piece[destination_ids.long()] = content[:, at : at + piece.shape[1]]
        at += piece.shape[1]


def zero_blocks(memory: torch.Tensor, pieces: Pieces, block_ids: torch.Tensor) -> None:
    """Fill blocks with zeros.

    Args:
        memory: uint8, memory of a pool.
        pieces: the pieces of a block.
        block_ids: int32 ``[n]``.
    """
    for piece in _pieces_of(memory, pieces):
        piece[block_ids.long()] = 0


def _pieces_of(memory: torch.Tensor, pieces: Pieces) -> Iterator[torch.Tensor]:
    """View one piece of every block: uint8 ``[num_blocks, size]``."""
    num_blocks = memory.numel() // sum(pieces.sizes)
    for offset, size, stride in zip(pieces.offsets, pieces.sizes, pieces.strides, strict=True):
        yield memory.as_strided((num_blocks, size), (stride, 1), offset)
