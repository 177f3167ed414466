"""Transfers: swaps there and back in every layout, states by block, eight bits with scales, latents."""

from typing import Literal

import pytest
import torch

from pagedkv import FullAttention, RecurrentState, SpaceConfig
from pagedkv.device import Companion, KeyValueShape, KVStorage, LatentShape, StateShape, StateTensor, Transfers


@pytest.mark.parametrize("layout", ["BLKNHC", "BLHNC", "LBKNHC", "LKBNHC"])
def test_what_is_swapped_out_comes_back_wherever_it_goes(device: torch.device, layout: str) -> None:
    shape = KeyValueShape(2, 3, 8, dtype=torch.float32, layout=layout)
    storage = KVStorage(SpaceConfig((FullAttention(4),), num_blocks=9, num_host_blocks=6), [shape], device)
    transfers = Transfers(storage)
    keys = storage.keys(0, 1)
    keys.copy_(torch.arange(keys.numel()).reshape(keys.shape))
    before = keys.clone()
    out = transfers.swap_out("device", [7, 2, 3, 4], [1, 5, 2, 3])
    out.wait()
    assert out.is_done()
    for layer in range(2):
        storage.keys(0, layer).zero_()
        storage.values(0, layer).zero_()
    transfers.swap_in("device", [1, 5, 2, 3], [4, 2, 8, 1]).wait()
    assert torch.equal(keys[[4, 2, 8, 1]], before[[7, 2, 3, 4]])
    assert not bool(keys[[0, 3, 5, 6, 7]].any())
    storage.close()


def test_copies_on_write_copy_every_layer(device: torch.device) -> None:
    storage = KVStorage(SpaceConfig((FullAttention(4),), num_blocks=9), [KeyValueShape(3, 2, 8)], device)
    for layer in range(3):
        storage.keys(0, layer)[2] = layer + 1
        storage.values(0, layer)[2] = -layer
    Transfers(storage).copy("device", [2], [5])
    for layer in range(3):
        assert storage.keys(0, layer)[5].unique().tolist() == [layer + 1]
        assert storage.values(0, layer)[5].unique().tolist() == [-layer]
    Transfers(storage).zero("device", [5])
    assert not bool(storage.keys(0, 2)[5].any())


@pytest.mark.parametrize("is_beside", [True, False], ids=["a companion", "negative control: a group of its own"])
def test_what_moves_a_block_moves_its_companions(device: torch.device, *, is_beside: bool) -> None:
    beside = (Companion("indexer", 2, 6, torch.float32),)
    groups = (FullAttention(4), FullAttention(4, pool="own"))
    config = SpaceConfig(groups, num_blocks={"device": 9, "own": 9}, num_host_blocks={"device": 6, "own": 6})
    shapes = [
        LatentShape(3, 8, torch.float32, companions=beside if is_beside else ()),
        LatentShape(2, 6, torch.float32),
    ]
    storage = KVStorage(config, shapes, device)
    transfers = Transfers(storage)
    view = storage.companion(0, "indexer", 1) if is_beside else storage.latents(1, 1)
    view.copy_(torch.arange(view.numel()).reshape(view.shape))
    before = view.clone()
    transfers.copy("device", [2], [5])
    assert torch.equal(view[5], before[2]) == is_beside
    view.copy_(before)
    transfers.swap_out("device", [7, 3], [1, 5]).wait()
    view.fill_(float("nan"))
    transfers.swap_in("device", [1, 5], [4, 8]).wait()
    assert torch.equal(view[[4, 8]], before[[7, 3]]) == is_beside
    transfers.zero("device", [4])
    assert bool((view[4] == 0).all()) == is_beside
    storage.close()


def test_a_companion_is_written_to_its_slots(device: torch.device) -> None:
    shape = LatentShape(3, 8, torch.float32, companions=(Companion("indexer", 2, 6, torch.float32),))
    storage = KVStorage(SpaceConfig((FullAttention(4),), num_blocks=3), [shape], device)
    tokens = torch.arange(12.0, device=device).view(2, 6)
    Transfers(storage).write_companion(0, "indexer", 1, tokens, torch.tensor([9, -1], device=device))
    assert torch.equal(storage.companion(0, "indexer", 1)[2, 1], tokens[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("scaling", "scales"), [("tensor", [[2.0], [4.0]]), ("head", [[2.0, 8.0], [4.0, 0.5]])])
def test_eight_bits_hold_values_divided_by_their_scale(
    device: torch.device, dtype: torch.dtype, scaling: Literal["tensor", "head"], scales: list[list[float]]
) -> None:
    """A scale for keys and one for values, or one a head of either; what is too large becomes the largest number."""
    shape = KeyValueShape(2, 2, 4, dtype=dtype, scaling=scaling)
    storage = KVStorage(SpaceConfig((FullAttention(4),), num_blocks=3), [shape], device)
    storage.scales(0)[1] = torch.tensor(scales)
    largest = torch.finfo(dtype).max
    content = torch.full((1, 2, 4), 64.0, device=device)
    content[0, :, 0] = 1e9
    Transfers(storage).reshape_and_cache(0, 1, content, content, torch.tensor([6], device=device))
    for view, mine in ((storage.keys(0, 1), scales[0]), (storage.values(0, 1), scales[1])):
        heads = mine * (2 // len(mine))
        assert view[1, 2].float().tolist() == [[largest, *[64.0 / scale] * 3] for scale in heads]
    assert not bool(storage.keys(0, 0)[0].float().any()), "another layer, the null block"


def test_latents_are_written_to_their_slots(device: torch.device) -> None:
    storage = KVStorage(SpaceConfig((FullAttention(4),), num_blocks=3), [LatentShape(2, 6, torch.float32)], device)
    latent = torch.arange(12.0, device=device).view(2, 6)
    Transfers(storage).write_latents(0, 1, latent, torch.tensor([9, -1], device=device))
    assert torch.equal(storage.latents(0, 1)[2, 1], latent[0])


def test_states_are_gathered_and_scattered_by_block(device: torch.device) -> None:
    shape = StateShape(2, (StateTensor("scan", (2, 3)), StateTensor("conv", (4,), torch.bfloat16)))
    storage = KVStorage(SpaceConfig((RecurrentState(8),), num_blocks=6), [shape], device)
    transfers = Transfers(storage)
    blocks = torch.tensor([3, 0, 5, 0], dtype=torch.int32, device=device)
    states = {"scan": torch.rand(4, 2, 3, device=device), "conv": torch.rand(4, 4, device=device).bfloat16()}
    transfers.scatter_states(0, 1, blocks, states)
    found = transfers.gather_states(0, 1, blocks)
    for name, state in states.items():
        assert torch.equal(found[name][[0, 2]], state[[0, 2]])
        assert not bool(found[name][[1, 3]].any()), "the null block holds nothing"
