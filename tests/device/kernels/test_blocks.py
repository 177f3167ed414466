"""Blocks copied and zeroed: Triton's kernels against the plain ones, byte by byte."""

import pytest
import torch

from pagedkv.device.kernels import reference
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.device.shapes import KeyValueShape, Pieces
from tests.device.kernels.suite import KERNEL_DEVICE, byte_poison, needs_kernels, same_bytes

pytestmark = needs_kernels

NUM_BLOCKS = 7
PIECES = [
    KeyValueShape(2, 2, dim, dtype=dtype, layout=layout).pieces(NUM_BLOCKS, block_size)
    for layout in ("BLKNHC", "LBKNHC", "LKBNHC")
    for dim, block_size, dtype in ((8, 4, torch.float32), (3, 1, torch.float8_e5m2), (64, 40, torch.bfloat16))
]
IDS = [([], []), ([3], [5]), ([0, 6, 2], [1, 4, 5])]


def whole(pieces: Pieces) -> Pieces:
    nbytes = sum(pieces.sizes)
    return Pieces((0,), (nbytes,), (nbytes,))


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize(("sources", "destinations"), IDS, ids=str)
def test_blocks_are_copied_within_a_pool(pieces: Pieces, sources: list[int], destinations: list[int]) -> None:
    plain = byte_poison(NUM_BLOCKS * sum(pieces.sizes), dtype=torch.uint8)
    fast = plain.to(KERNEL_DEVICE, copy=True)
    ids = [torch.tensor(values, dtype=torch.int32) for values in (sources, destinations)]
    reference.copy_blocks(plain, pieces, ids[0], plain, pieces, ids[1])
    there = [values.to(KERNEL_DEVICE) for values in ids]
    kernels_for(KERNEL_DEVICE, "triton").copy_blocks(fast, pieces, there[0], fast, pieces, there[1])
    assert same_bytes(plain, fast)


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_blocks_are_gathered_into_one_piece_and_scattered_back(pieces: Pieces) -> None:
    nbytes = sum(pieces.sizes)
    pool = byte_poison(NUM_BLOCKS * nbytes, dtype=torch.uint8).to(KERNEL_DEVICE)
    plain, fast = (torch.zeros(3 * nbytes, dtype=torch.uint8) for _ in range(2))
    fast = fast.to(KERNEL_DEVICE)
    blocks, places = (torch.tensor(values, dtype=torch.int32) for values in ([4, 0, 6], [2, 0, 1]))
    reference.copy_blocks(pool.cpu(), pieces, blocks, plain, whole(pieces), places)
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    kernels.copy_blocks(pool, pieces, blocks.to(KERNEL_DEVICE), fast, whole(pieces), places.to(KERNEL_DEVICE))
    assert same_bytes(plain, fast)
    back = torch.zeros_like(pool)
    kernels.copy_blocks(fast, whole(pieces), places.to(KERNEL_DEVICE), back, pieces, blocks.to(KERNEL_DEVICE))
    again = torch.zeros(3 * nbytes, dtype=torch.uint8)
    reference.copy_blocks(back.cpu(), pieces, blocks, again, whole(pieces), places)
    assert same_bytes(again, plain)


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("block_ids", [[], [0], [6, 2, 3]], ids=str)
def test_blocks_are_zeroed(pieces: Pieces, block_ids: list[int]) -> None:
    plain = byte_poison(NUM_BLOCKS * sum(pieces.sizes), dtype=torch.uint8)
    fast = plain.to(KERNEL_DEVICE, copy=True)
    ids = torch.tensor(block_ids, dtype=torch.int32)
    reference.zero_blocks(plain, pieces, ids)
    kernels_for(KERNEL_DEVICE, "triton").zero_blocks(fast, pieces, ids.to(KERNEL_DEVICE))
    assert same_bytes(plain, fast)
