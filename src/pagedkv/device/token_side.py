"""TokenSide: one tensor of keys, values or latents that a step writes, and its destination."""

from typing import NamedTuple

import torch

__all__ = ["TokenSide"]


class TokenSide(NamedTuple):
    """Tokens, and the blocks that they are written to.

    Args:
        tokens: float ``[n, heads, dim]``, of any strides.
        blocks: ``[num_blocks, block_size, heads, dim]``, of any strides, of one layer.
        scales: float32 ``[heads or 1]`` if ``blocks`` has eight bits: the value divided by its scale is stored.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor | None = None
