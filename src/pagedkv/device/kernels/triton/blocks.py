"""Whole blocks on a GPU: one kernel copies or zeroes all pieces of all blocks."""

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl

from pagedkv.device.shapes import Pieces

CHUNK_NBYTES: Final = 32 * 1024
"""Bytes that one program copies: 16 blocks of 2 MiB take 1,024 programs."""
VECTOR_NBYTES: Final = 16
"""Bytes that a thread loads at once, if all sizes are multiples of it."""


def copy_blocks(
    source: torch.Tensor,
    source_pieces: Pieces,
    source_ids: torch.Tensor,
    destination: torch.Tensor,
    destination_pieces: Pieces,
    destination_ids: torch.Tensor,
) -> None:
    """As :func:`pagedkv.device.kernels.reference.copy_blocks`."""
    if len(source_ids) == 0:
        return
    table, longest, unit = _piece_table(source_pieces, destination_pieces, source.device)
    chunk = _chunk(longest)
    _copy_kernel[(triton.cdiv(longest, chunk), table.shape[0], len(source_ids))](
        _in_units(source, unit),
        source_ids,
        _in_units(destination, unit),
        destination_ids,
        table,
        UNIT=unit,
        CHUNK=chunk,
        num_warps=8,
    )


def zero_blocks(memory: torch.Tensor, pieces: Pieces, block_ids: torch.Tensor) -> None:
    """As :func:`pagedkv.device.kernels.reference.zero_blocks`."""
    if len(block_ids) == 0:
        return
    table, longest, unit = _piece_table(pieces, pieces, memory.device)
    chunk = _chunk(longest)
    _zero_kernel[(triton.cdiv(longest, chunk), table.shape[0], len(block_ids))](
        _in_units(memory, unit), block_ids, table, UNIT=unit, CHUNK=chunk, num_warps=8
    )


def _chunk(longest: int) -> int:
    """Return the bytes for one program: at most those of the longest piece."""
    return min(CHUNK_NBYTES, triton.next_power_of_2(longest))


def _in_units(memory: torch.Tensor, unit: int) -> torch.Tensor:
    """View memory in words of ``unit`` bytes."""
    return memory if unit == 1 else memory.view(torch.int32)


@lru_cache(maxsize=64)
def _piece_table(source: Pieces, destination: Pieces, device: torch.device) -> tuple[torch.Tensor, int, int]:
    """Match the pieces of two sides.

    Returns int64 ``[pieces, 5]``, in bytes (offset and stride of either side, and the size); the longest size; and the
    unit of 16, 4 or 1 bytes of which all are multiples. Sides with different pieces are split at the ends of both.
    """
    rows = []
    left, right, at_left, at_right = 0, 0, 0, 0
    while left < len(source.sizes) and right < len(destination.sizes):
        size = min(source.sizes[left] - at_left, destination.sizes[right] - at_right)
        rows.append([
            source.offsets[left] + at_left,
            source.strides[left],
            destination.offsets[right] + at_right,
            destination.strides[right],
            size,
        ])  # fmt: skip
        at_left, at_right = at_left + size, at_right + size
        if at_left == source.sizes[left]:
            left, at_left = left + 1, 0
        if at_right == destination.sizes[right]:
            right, at_right = right + 1, 0
    unit = next(unit for unit in (VECTOR_NBYTES, 4, 1) if all(value % unit == 0 for row in rows for value in row))
    return torch.tensor(rows, dtype=torch.int64, device=device), max(row[4] for row in rows), unit


@triton.jit
def _copy_kernel(source, source_ids, destination, destination_ids, pieces, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    piece = pieces + tl.program_id(1) * 5
    word: tl.constexpr = 1 if UNIT == 1 else 4
    size = tl.load(piece + 4) // word
    from_block = tl.load(source_ids + tl.program_id(2)).to(tl.int64)
    to_block = tl.load(destination_ids + tl.program_id(2)).to(tl.int64)
    begin = (tl.load(piece) + from_block * tl.load(piece + 1)) // word
    target = (tl.load(piece + 2) + to_block * tl.load(piece + 3)) // word
    if UNIT == 16:
        begin = tl.multiple_of(begin, 4)
        target = tl.multiple_of(target, 4)
        size = tl.multiple_of(size, 4)
    at = tl.program_id(0) * (CHUNK // word) + tl.arange(0, CHUNK // word)
    is_inside = at < size
    tl.store(destination + target + at, tl.load(source + begin + at, mask=is_inside), mask=is_inside)


@triton.jit
def _zero_kernel(memory, block_ids, pieces, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    piece = pieces + tl.program_id(1) * 5
    word: tl.constexpr = 1 if UNIT == 1 else 4
    size = tl.load(piece + 4) // word
    block = tl.load(block_ids + tl.program_id(2)).to(tl.int64)
    begin = (tl.load(piece) + block * tl.load(piece + 1)) // word
    if UNIT == 16:
        begin = tl.multiple_of(begin, 4)
        size = tl.multiple_of(size, 4)
    at = tl.program_id(0) * (CHUNK // word) + tl.arange(0, CHUNK // word)
    zero = tl.zeros([CHUNK // word], memory.dtype.element_ty)
    tl.store(memory + begin + at, zero, mask=at < size)
