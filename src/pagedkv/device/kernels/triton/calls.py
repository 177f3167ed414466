"""Calls on block tables on a GPU: rows in batch order, and slots of positions."""

import torch
import triton
import triton.language as tl

from pagedkv.device.kernels.triton.searching import last_at_most
from pagedkv.device.kernels.triton.words import (
    BASE,
    BLOCK_SIZE,
    HAS_SLOTS,
    NUM_COLUMNS,
    WIDTH,
)
from pagedkv.device.table_arrays import TableArrays

PLACE_TILE = 2048
TOKEN_TILE = 512


def gather_rows(arrays: TableArrays, rows: torch.Tensor, num_places: int) -> None:
    """As :func:`pagedkv.device.kernels.reference.gather_rows`."""
    if num_places == 0:
        return
    _gather_kernel[(num_places, arrays.num_tables)](
        rows,
        arrays.geometry,
        arrays.tables,
        arrays.batch_tables,
        arrays.extents,
        arrays.held_rows,
        arrays.held_extents,
        rows.shape[0],
        max_rows=arrays.max_rows,
        TILE=PLACE_TILE,
    )


def map_slots(
    arrays: TableArrays, rows: torch.Tensor, offsets: torch.Tensor, positions: torch.Tensor, refused: torch.Tensor
) -> None:
    """As :func:`pagedkv.device.kernels.reference.map_slots`."""
    max_tokens = arrays.slots.shape[1]
    _slots_kernel[(triton.cdiv(max_tokens, TOKEN_TILE), arrays.num_tables)](
        rows,
        offsets,
        positions,
        refused,
        arrays.geometry,
        arrays.tables,
        arrays.slots,
        rows.shape[0],
        positions.shape[0],
        max_tokens=max_tokens,
        TILE=TOKEN_TILE,
    )


@triton.jit
def _gather_kernel(
    rows,
    geometry,
    tables,
    batch_tables,
    extents,
    held_rows,
    held_extents,
    num_rows,
    max_rows: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0)
    group = tl.program_id(1)
    base = tl.load(geometry + group * NUM_COLUMNS + BASE)
    width = tl.load(geometry + group * NUM_COLUMNS + WIDTH)
    row = tl.load(rows + place, mask=place < num_rows, other=-1)
    extent = tl.load(extents + group * max_rows + row, mask=row >= 0, other=0)
    source = tables + base + tl.maximum(row, 0).to(tl.int64) * width
    target = batch_tables + base + place.to(tl.int64) * width
    for first in range(0, width, TILE):
        index = first + tl.arange(0, TILE)
        block = tl.load(source + index, mask=(index < extent) & (index < width), other=0)
        tl.store(target + index, block, mask=index < width)
    tl.store(held_rows + group * max_rows + place, -1)
    tl.store(held_extents + group * max_rows + place, width.to(tl.int32))


@triton.jit
def _slots_kernel(
    rows,
    offsets,
    positions,
    refused,
    geometry,
    tables,
    slots,
    num_rows,
    num_positions,
    max_tokens: tl.constexpr,
    TILE: tl.constexpr,
):
    group = tl.program_id(1)
    base = tl.load(geometry + group * NUM_COLUMNS + BASE)
    width = tl.load(geometry + group * NUM_COLUMNS + WIDTH)
    block_size = tl.load(geometry + group * NUM_COLUMNS + BLOCK_SIZE)
    has_slots = tl.load(geometry + group * NUM_COLUMNS + HAS_SLOTS)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    num_tokens = tl.minimum(num_positions, tl.load(offsets + num_rows))
    is_token = token < num_tokens * has_slots
    place = last_at_most(offsets, num_rows, token, 0)
    row = tl.load(rows + place, mask=is_token, other=-1)
    position = tl.load(positions + token, mask=is_token, other=0)
    position -= tl.load(refused + place, mask=is_token, other=0)
    index = position // block_size
    is_there = is_token & (row >= 0) & (position >= 0) & (index < width)
    block = tl.load(tables + base + row.to(tl.int64) * width + index, mask=is_there, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(slots + group * max_tokens + token, tl.where(is_there, slot, -1), mask=token < max_tokens)
