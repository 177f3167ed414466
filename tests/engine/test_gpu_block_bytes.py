"""Copies between a GPU's blocks and pinned memory, beside steps: order on the device, and memory that is held."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import KeyValueShape, KVStorage
from pagedkv.device.memory import PinnedArena
from pagedkv.engine.content import GpuBlockBytes
from pagedkv.tiers.entry_blocks import fill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SHAPE = KeyValueShape(2, 2, 64, dtype=torch.bfloat16)
BLOCKS: Int32Array = np.array([5, 2, 60, 61, 7], np.int32)
MIB = 2**20
A_WHILE = 1_000_000_000  # cycles: half a second or more


@pytest.fixture
def storage() -> Iterator[KVStorage]:
    made = KVStorage(SpaceConfig((FullAttention(16),), 64, max_tokens=4096), [SHAPE], "cuda")
    made.pools["device"].device_bytes.random_(0, 256)
    block_bytes = GpuBlockBytes(made, [], PinnedArena(MIB, "staging"))  # loads kernels, which waits for the device
    copied = block_bytes.read(0, BLOCKS)
    assert copied is not None
    block_bytes.write(0, BLOCKS, [copied.rows])
    blocks_of(made)[torch.from_numpy(BLOCKS).long().cuda()] = 0
    block_bytes.close()
    yield made
    torch.cuda.synchronize()
    made.close()


def blocks_of(storage: KVStorage) -> torch.Tensor:
    pool = storage.pools["device"]
    return pool.device_bytes.view(pool.num_blocks, pool.block_nbytes)


def test_what_is_read_is_what_launched_steps_leave_and_not_what_later_ones_write(storage: KVStorage) -> None:
    block_bytes = GpuBlockBytes(storage, [], PinnedArena(MIB, "staging"))
    ids = torch.from_numpy(BLOCKS).long().cuda()
    torch.cuda._sleep(A_WHILE)
    blocks_of(storage).index_fill_(0, ids, 7)
    copied = block_bytes.read(0, BLOCKS)
    blocks_of(storage).index_fill_(0, ids, 9)
    assert copied is not None
    assert not copied.ticket.is_done(), "no one waited on the host"
    copied.ticket.wait()
    assert (copied.rows == 7).all()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_is_written_comes_behind_launched_steps_and_before_those_that_wait(
    storage: KVStorage, *, is_pinned: bool
) -> None:
    arena = PinnedArena(MIB, "a tier")
    block_bytes = GpuBlockBytes(storage, [arena], PinnedArena(MIB, "staging"))
    nbytes = block_bytes.nbytes[0]
    buffer = arena.take(len(BLOCKS) * nbytes)
    assert buffer is not None
    part = np.asarray(buffer) if is_pinned else np.empty(len(BLOCKS) * nbytes, np.uint8)
    part[:] = np.random.default_rng(3).integers(0, 256, len(part))
    expected = part.reshape(len(BLOCKS), nbytes).copy()
    ids = torch.from_numpy(BLOCKS).long().cuda()
    others = torch.tensor([each for each in range(1, 64) if each not in BLOCKS.tolist()]).cuda()
    before = blocks_of(storage)[others].clone()
    torch.cuda._sleep(A_WHILE)
    blocks_of(storage).index_fill_(0, ids, 1)
    tickets = fill(block_bytes, [([BLOCKS[:3]], (part[: 3 * nbytes].data,)), ([BLOCKS[3:]], (part.data,))])
    assert tickets is not None
    assert not tickets[0].is_done()
    for ticket in tickets:
        block_bytes.order_steps_behind(ticket)
    came = blocks_of(storage)[ids].clone()
    assert torch.equal(came.cpu(), torch.from_numpy(expected))
    assert torch.equal(blocks_of(storage)[others], before)


def test_memory_is_held_until_its_copies_have_ended(storage: KVStorage) -> None:
    arena = PinnedArena(5 * storage.pools["device"].block_nbytes, "staging", alignment=64)
    block_bytes = GpuBlockBytes(storage, [], arena)
    torch.cuda._sleep(A_WHILE)
    copied = block_bytes.read(0, BLOCKS)
    assert copied is not None
    ticket = copied.ticket
    del copied
    assert block_bytes.room_nbytes == 0
    assert block_bytes.read(0, BLOCKS[:1]) is None
    ticket.wait()
    assert block_bytes.room_nbytes == arena.nbytes
    assert block_bytes.read(0, BLOCKS) is not None


def test_rows_find_room_where_the_staging_memory_is_full(storage: KVStorage) -> None:
    arena = PinnedArena(4096, "staging")
    held = arena.take(4096)
    block_bytes = GpuBlockBytes(storage, [], arena)
    row = np.full((1, block_bytes.nbytes[0]), 3, np.uint8)
    block_bytes.write(0, BLOCKS[:1], [row]).wait()
    assert (blocks_of(storage)[int(BLOCKS[0])] == 3).all()
    assert held is not None


def test_no_blocks_are_read_at_once(storage: KVStorage) -> None:
    block_bytes = GpuBlockBytes(storage, [], PinnedArena(MIB, "staging"))
    copied = block_bytes.read(0, BLOCKS[:0])
    assert copied is not None
    assert copied.ticket.is_done()
    assert copied.rows.shape == (0, block_bytes.nbytes[0])
