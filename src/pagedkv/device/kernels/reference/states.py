"""Recurrent states in plain torch: read from blocks for the rows of a step, and written back."""

from collections.abc import Sequence

import torch

from pagedkv.device.state_side import StateSide

__all__ = ["read_states", "write_states"]


def read_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """Read the state of each row's block; zeros for the null block, with which a sequence begins.

    Args:
        sides: tensors of the states.
        block_ids: int32 ``[n]``.

    Cost: O(elements).
    """
    index = block_ids.long()
    for blocks, rows in sides:
        is_there = (index > 0).view(-1, *[1] * (blocks.ndim - 1))
        rows.copy_(torch.where(is_there, blocks[index], 0).transpose(0, 1))


def write_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """Write each row's state to its block; states for the null block are dropped.

    Args:
        sides: tensors of the states.
        block_ids: int32 ``[n]``, distinct except for null blocks.

    Cost: O(elements).
    """
    kept = block_ids > 0
    index = block_ids[kept].long()
    for blocks, rows in sides:
        blocks[index] = rows[:, kept].transpose(0, 1)
