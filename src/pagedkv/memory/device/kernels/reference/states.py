"""Recurrent states in plain torch: read out of blocks for the rows of a step, and written back."""

from collections.abc import Sequence

import torch

from pagedkv.memory.device.state_side import StateSide

__all__ = ["read_states", "write_states"]


def read_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """Give each row the state of its block; zeros where that is the null block: a sequence begins there.

    Args:
        sides: tensors of the states; block_ids: int32 ``[n]``.

    Cost: O(elements).
    """
    index = block_ids.long()
    for blocks, rows in sides:
        is_there = (index > 0).view(-1, *[1] * (blocks.ndim - 1))
        rows.copy_(torch.where(is_there, blocks[index], 0).transpose(0, 1))


def write_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """Write each row's state to its block; what is for the null block goes nowhere.

    Args:
        sides: tensors of the states; block_ids: int32 ``[n]``, different but for null blocks.

    Cost: O(elements).
    """
    kept = block_ids > 0
    index = block_ids[kept].long()
    for blocks, rows in sides:
        blocks[index] = rows[:, kept].transpose(0, 1)
