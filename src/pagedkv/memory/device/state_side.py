"""One tensor of recurrent states: the blocks that keep it, and the rows of a step that continue it."""

from typing import NamedTuple

import torch

__all__ = ["StateSide"]


class StateSide(NamedTuple):
    """States in blocks, and in rows.

    Args:
        blocks: ``[num_blocks, layers, *shape]``; rows: ``[layers, n, *shape]``, of the same type. Elements of one state
            lie behind one another in both.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
