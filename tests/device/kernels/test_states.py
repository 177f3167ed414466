"""Recurrent states read out of blocks and written back: Triton's kernel against the plain one, byte by byte."""

import pytest
import torch

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import RecurrentState
from pagedkv.device.kernels import reference
from pagedkv.device.kernels.inputs import StateSide
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.device.shapes import StateShape, StateTensor
from pagedkv.device.storage import KVStorage
from pagedkv.device.transfers import Transfers
from tests.device.kernels.suite import IS_INTERPRETED, KERNEL_DEVICE, byte_poison, needs_kernels, same_bytes

pytestmark = needs_kernels

NUM_BLOCKS, NUM_LAYERS = 9, 3
TENSORS = (
    StateTensor("convolution_0", (5, 3), torch.bfloat16),
    StateTensor("scan_0", (2, 7, 4), torch.float32),
    StateTensor("scan_1", (1,), torch.float16),
)
IDS = {
    "no rows": [],
    "one": [3],
    "null blocks": [0, 0],
    "any": [8, 0, 1, 5, 0, 7],
}
cpu = torch.device("cpu")


def storage_of(device: torch.device) -> KVStorage:
    config = SpaceConfig((RecurrentState(4),), NUM_BLOCKS)
    storage = KVStorage(config, [StateShape(NUM_LAYERS, TENSORS)], device)
    pool = storage.pool_of(0).device_bytes
    pool.copy_(byte_poison(pool.numel(), dtype=torch.uint8))
    return storage


def sides_of(storage: KVStorage, num_rows: int) -> list[StateSide]:
    """Every tensor of all layers, with rows full of random bytes, some space between them."""
    sides = []
    for view in storage.states_of_layers(0).values():
        rows = byte_poison(NUM_LAYERS, num_rows + 1, *view.shape[2:], dtype=view.dtype, seed=1)
        sides.append(StateSide(view, rows.to(storage.device)[:, :num_rows]))
    return sides


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("does", ["read_states", "write_states"])
def test_does_what_plain_torch_does(does: str, ids: list[int]) -> None:
    both = [storage_of(device) for device in (cpu, KERNEL_DEVICE)]
    plain, fast = (sides_of(storage, len(ids)) for storage in both)
    getattr(reference, does)(plain, torch.tensor(ids, dtype=torch.int32))
    numbers = torch.tensor(ids, dtype=torch.int32, device=KERNEL_DEVICE)
    getattr(kernels_for(KERNEL_DEVICE, "triton"), does)(fast, numbers)
    for one, other in zip(plain, fast, strict=True):
        assert same_bytes(other.rows, one.rows)
    assert same_bytes(*(storage.pool_of(0).device_bytes for storage in both))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_what_is_written_is_read(kernels: str) -> None:
    """Layer by layer, of tensors of any strides; a sequence that begins gets zeros."""
    storage = storage_of(KERNEL_DEVICE)
    transfers = Transfers(storage, kernels=kernels)  # type: ignore[arg-type]
    ids = torch.tensor([4, 0, 2], dtype=torch.int32, device=KERNEL_DEVICE)
    null = storage.pool_of(0).device_bytes[: storage.pool_of(0).block_nbytes].clone()
    written = []
    for layer in range(NUM_LAYERS):
        states = {each.name: torch.randn(*each.shape, 3).movedim(-1, 0).to(each.dtype) for each in TENSORS}
        written.append({name: state.to(KERNEL_DEVICE) for name, state in states.items()})
        transfers.scatter_states(0, layer, ids, written[-1])
    assert same_bytes(storage.pool_of(0).device_bytes[: len(null)], null), "what is for the null block goes nowhere"
    for layer, found in enumerate(transfers.gather_states_of_layers(0, ids)):
        alone = transfers.gather_states(0, layer, ids)
        for name, state in written[layer].items():
            assert same_bytes(found[name], alone[name])
            assert same_bytes(found[name][[0, 2]], state[[0, 2]])
            assert not found[name][1].any()


if not IS_INTERPRETED:

    def test_a_large_state_at_the_end_of_a_large_pool() -> None:
        """Further than 32-bit numbers reach."""
        size = 2**20
        num_blocks = 2200 if KERNEL_DEVICE.type == "cuda" else 3
        blocks = torch.empty(num_blocks, 1, size, dtype=torch.bfloat16, device=KERNEL_DEVICE)
        rows = torch.randn(1, 2, size, device=KERNEL_DEVICE).bfloat16()
        ids = torch.tensor([num_blocks - 1, 1], dtype=torch.int32, device=KERNEL_DEVICE)
        kernels = kernels_for(KERNEL_DEVICE, "triton")
        kernels.write_states([StateSide(blocks, rows)], ids)
        assert same_bytes(blocks[ids.long(), 0], rows[0])
        read = torch.empty_like(rows)
        kernels.read_states([StateSide(blocks, read)], ids)
        assert same_bytes(read, rows)
