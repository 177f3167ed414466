"""Tokens in plain torch: a step's keys, values or latents are written to their slots."""

from collections.abc import Sequence
from typing import Final

import torch

from pagedkv.device.token_side import TokenSide

__all__ = ["FP8_LARGEST", "write_tokens"]

FP8_LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite number of each type; larger numbers are stored as this one, since e4m3 has no infinity."""


def write_tokens(sides: Sequence[TokenSide], slots: torch.Tensor) -> None:
    """Write each token's heads to its slot.

    Args:
        sides: keys and values, or latents alone.
        slots: int64 ``[n or more]``, distinct except for -1, which is skipped; entries from n on are not read.

    Cost: O(tokens x heads x dim).
    """
    for side in sides:
        _write_side(side, slots[: len(side.tokens)])


def _write_side(side: TokenSide, slots: torch.Tensor) -> None:
    blocks, block_size = side.blocks, side.blocks.shape[1]
    is_there = (slots >= 0) & (slots < blocks.shape[0] * block_size)
    kept, slots = side.tokens[is_there], slots[is_there]
    if side.scales is not None:
        largest = FP8_LARGEST[blocks.dtype]
        kept = (kept.float() / side.scales[:, None]).clamp(-largest, largest)
    stored = kept.to(blocks.dtype)
    if blocks.dtype.itemsize == 1:  # torch cannot index eight-bit floats
        stored, blocks = stored.view(torch.uint8), blocks.view(torch.uint8)
    blocks[slots // block_size, slots % block_size] = stored
