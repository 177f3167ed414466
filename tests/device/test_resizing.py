"""Pools that change their size: memory goes and comes in runs of blocks, at addresses that stay. Also on a GPU."""

import numpy as np
import pytest
import torch

from pagedkv import BlockHolders, BlockSpace, FullAttention, SpaceConfig
from pagedkv.contract.arrays import Int32Array
from pagedkv.device import KeyValueShape, KVStorage, runs_of_pools
from pagedkv.device.memory import unit_nbytes
from pagedkv.errors import ConfigurationError, StorageError
from tests.device.test_reserved_memory import used_nbytes

MIB = 2**20
SHAPE = KeyValueShape(num_layers=6, num_heads=8, key_dim=128, dtype=torch.float16)  # 16 tokens: 393,216 bytes
NUM_BLOCKS = 1000
CONFIG = SpaceConfig((FullAttention(16),), num_blocks=NUM_BLOCKS)


def run_on(device: torch.device) -> int:
    return runs_of_pools(CONFIG, [SHAPE], device)["device"]


def shrunk(space: BlockSpace, num_runs: int, run: int) -> Int32Array:
    answer = space.shrink(num_runs * run, run=run)
    assert not isinstance(answer, BlockHolders)
    return answer


def test_a_run_is_what_the_device_can_release(device: torch.device) -> None:
    unit, run = unit_nbytes(device), run_on(device)
    assert run * SHAPE.block_nbytes(16) % unit == 0
    assert all(fewer * SHAPE.block_nbytes(16) % unit for fewer in range(1, run))


def test_memory_goes_and_comes_at_the_same_addresses(device: torch.device) -> None:
    run = run_on(device)
    space, num_runs = BlockSpace(CONFIG), 600 // run
    storage = KVStorage(CONFIG, [SHAPE], device, absent={"device": np.zeros(0, np.int32)})
    keys = storage.keys(0, 0)
    storage.pools["device"].device_bytes.fill_(1)
    full = used_nbytes(device)
    gone = shrunk(space, num_runs, run)
    storage.release("device", gone)
    nbytes = len(gone) * SHAPE.block_nbytes(16)
    assert abs(full - used_nbytes(device) - nbytes) < 56 * MIB
    assert storage.device_nbytes == (NUM_BLOCKS - len(gone)) * SHAPE.block_nbytes(16)
    left = sorted(set(range(NUM_BLOCKS)) - set(gone.tolist()))
    assert bool((keys[left].view(torch.uint8) == 1).all()), "what stays has its content"
    storage.take("device", space.grow(len(gone), run=run))
    assert storage.keys(0, 0).data_ptr() == keys.data_ptr()
    keys[gone.tolist()] = 2.0
    assert bool((keys[gone.tolist()] == 2).all())
    storage.close()


def test_a_storage_begins_without_the_absent_blocks_and_sleeps_without_them(device: torch.device) -> None:
    run, before = run_on(device), used_nbytes(device)
    space = BlockSpace(CONFIG)
    gone = shrunk(space, 900 // run, run)
    storage = KVStorage(CONFIG, [SHAPE], device, absent={"device": gone})
    left = sorted(set(range(NUM_BLOCKS)) - set(gone.tolist()))
    for _ in range(2):
        storage.keys(0, 0)[left] = 1.0
        assert used_nbytes(device) - before < len(left) * SHAPE.block_nbytes(16) + 56 * MIB
        storage.sleep()
        storage.wake()
    storage.close()


def test_what_is_no_run_or_no_pool_is_refused() -> None:
    device = torch.device("cpu")
    storage = KVStorage(CONFIG, [SHAPE], absent={"device": np.zeros(0, np.int32)})
    small = KVStorage(CONFIG, [KeyValueShape(1, 1, 8)], absent={"device": np.zeros(0, np.int32)})
    run = small.pools["device"].run
    assert run > 1, "the small blocks of this test are less than a page"
    assert run_on(device) == 1
    for ids in (range(1, run), range(1, run + 1), range(run, 3 * run - 1)):
        with pytest.raises(ConfigurationError, match=f"has runs of {run} blocks"):
            small.release("device", np.array(ids, np.int32))
    with pytest.raises(ConfigurationError, match="'host' is no pool that changes its size"):
        storage.release("host", np.array([1], np.int32))
    fixed = KVStorage(CONFIG, [SHAPE])
    with pytest.raises(ConfigurationError, match="no pool that changes its size"):
        fixed.take("device", np.array([1], np.int32))
    storage.sleep()
    with pytest.raises(StorageError, match="asleep"):
        storage.release("device", np.array([1], np.int32))
    layered = KeyValueShape(2, 2, 8, layout="LBKNHC")
    with pytest.raises(ConfigurationError, match="block-major"):
        KVStorage(CONFIG, [layered], absent={"device": np.zeros(0, np.int32)})


def test_memory_of_copies_in_flight_stays() -> None:
    class Copy:
        def is_done(self) -> bool:
            return False

    storage = KVStorage(CONFIG, [SHAPE], absent={"device": np.zeros(0, np.int32)})
    storage.began(Copy())
    with pytest.raises(StorageError, match="cannot be made smaller"):
        storage.release("device", np.array([1], np.int32))
    assert storage.device_nbytes == NUM_BLOCKS * SHAPE.block_nbytes(16)
