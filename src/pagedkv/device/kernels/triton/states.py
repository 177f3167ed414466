"""Recurrent states on a GPU: one kernel for all rows and layers of a tensor, without lengths on the host."""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from pagedkv.device.kernels.inputs import StateSide

WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types that elements are copied as, so that the bits of a NaN do not change."""
CHUNK: Final = 4096
"""Most elements that one program copies."""


def read_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.read_states`."""
    for side in sides:
        _copy(side, block_ids, to_blocks=False)


def write_states(sides: Sequence[StateSide], block_ids: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.write_states`."""
    for side in sides:
        _copy(side, block_ids, to_blocks=True)


def _copy(side: StateSide, block_ids: torch.Tensor, *, to_blocks: bool) -> None:
    if side.rows.numel() == 0:
        return
    blocks, rows = (states.view(*states.shape[:2], -1).view(WORDS[states.dtype.itemsize]) for states in side)
    num_layers, num_rows, size = rows.shape
    chunk = min(CHUNK, triton.next_power_of_2(size))
    _copy_kernel[(num_rows, num_layers, triton.cdiv(size, chunk))](
        blocks,
        rows,
        block_ids,
        *blocks.stride()[:2],
        *rows.stride()[:2],
        size,
        TO_BLOCKS=to_blocks,
        CHUNK=chunk,
        num_warps=4,
    )


@triton.jit
def _copy_kernel(
    blocks,
    rows,
    block_ids,
    block_b,
    block_l,
    row_l,
    row_n,
    size,
    TO_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    block = tl.load(block_ids + row).to(tl.int64)
    kept = blocks + block * block_b + layer * block_l + at
    given = rows + layer * row_l + row * row_n + at
    num_kept = tl.where(block > 0, size, 0)
    if TO_BLOCKS:
        tl.store(kept, tl.load(given, mask=at < num_kept, other=0), mask=at < num_kept)
    else:
        tl.store(given, tl.load(kept, mask=at < num_kept, other=0), mask=at < size)
