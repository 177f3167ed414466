"""StateSide: one tensor of recurrent states, in blocks and in the rows of a step."""

from typing import NamedTuple

import torch

__all__ = ["StateSide"]


class StateSide(NamedTuple):
    """States in blocks, and in rows.

    Args:
        blocks: ``[num_blocks, layers, *shape]``.
        rows: ``[layers, n, *shape]``, of the same type. The elements of one state are contiguous in both.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
