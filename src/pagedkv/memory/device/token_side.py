"""One side of what a step writes: its keys, its values, or its latents."""

from typing import NamedTuple

import torch

__all__ = ["TokenSide"]


class TokenSide(NamedTuple):
    """Tokens, and the blocks that they are written to.

    Args:
        tokens: float ``[n, heads, dim]``, of any strides.
        blocks: ``[num_blocks, block_size, heads, dim]``, of any strides, of one layer.
        scales: float32 ``[heads or 1]`` where ``blocks`` has eight bits: what is stored is the value divided by it.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor | None = None
