"""Storage: what lies where in every layout, sizes that agree with the models, stale memory, sleep."""

from typing import Any

import pytest
import torch

from pagedkv import FullAttention, RecurrentState, SlidingWindow, SpaceConfig
from pagedkv.device import (
    Companion,
    GroupShape,
    KeyValueShape,
    KVStorage,
    LatentShape,
    StateShape,
    StateTensor,
    Transfers,
    block_nbytes_of,
    free_nbytes,
    num_blocks_that_fit,
)
from pagedkv.device.memory import ReservedMemory
from pagedkv.errors import ConfigurationError, DeviceUnavailableError
from pagedkv.models import read_model
from pagedkv.models.memory import block_nbytes_of as nbytes_of_model, groups_of

LAYOUTS = ("BLKNHC", "BLHNC", "BLNHC", "LBKNHC", "LKBNHC", "KLBHNC", "HBLKNC")
GIB = 2**30


def storage_of(
    shape: KeyValueShape | LatentShape, device: torch.device | str = "cpu", block_size: int = 4
) -> KVStorage:
    return KVStorage(SpaceConfig((FullAttention(block_size),), num_blocks=5, num_host_blocks=3), [shape], device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value_dim", [8, 4])
def test_every_element_has_one_place_in_every_layout(layout: str, value_dim: int) -> None:
    storage = storage_of(KeyValueShape(2, 3, 8, value_dim, dtype=torch.float32, layout=layout))
    memory = storage.pools["device"].device_bytes.view(torch.float32)
    memory.zero_()
    number = 0
    for layer in range(2):
        for view in (storage.keys(0, layer), storage.values(0, layer)):
            view.copy_(torch.arange(number, number + view.numel()).reshape(view.shape))
            number += view.numel()
    assert torch.equal(memory.sort().values, torch.arange(number, dtype=torch.float32))


def test_the_default_layout_is_that_of_the_design() -> None:
    storage = storage_of(KeyValueShape(2, 3, 8, dtype=torch.float32))
    whole = storage.pools["device"].device_bytes.view(torch.float32).view(5, 2, 2, 4, 3, 8)
    assert storage.keys(0, 1).data_ptr() == whole[:, 1, 0].data_ptr()
    assert storage.values(0, 1).stride() == whole[:, 1, 1].stride()
    assert storage.keys_and_values(0, 1).stride() == whole[:, 1].stride()
    assert storage.keys_and_values(0, 1).data_ptr() == whole[:, 1].data_ptr()


@pytest.mark.parametrize("layout", ["BLKNHC", "BLHNC", "LBKNHC", "BLNHC"])
def test_pages_are_parts_of_blocks(layout: str) -> None:
    """Page ``block * block_step + part * part_step`` is the part's tokens, whatever lies between two blocks."""
    storage = storage_of(KeyValueShape(3, 2, 8, dtype=torch.float32, layout=layout), block_size=8)
    pages = storage.pages(0, 1, 2)
    keys, numbers = storage.keys(0, 1), pages.numbers
    keys.copy_(torch.arange(keys.numel()).reshape(keys.shape))
    storage.values(0, 1).copy_(-keys)
    for block in range(5):
        for part in range(4):
            page = block * numbers.block_step + part * numbers.part_step
            assert torch.equal(pages.keys[page], keys[block, 2 * part : 2 * part + 2])
            assert torch.equal(pages.values[page], -pages.keys[page])


def test_a_latent_is_one_tensor_and_a_state_several() -> None:
    config = SpaceConfig((FullAttention(4), RecurrentState(8)), num_blocks={"device": 6, "state": 3})
    state = StateShape(2, (StateTensor("conv", (4, 2), torch.bfloat16), StateTensor("scan", (3, 5))))
    storage = KVStorage(config, [LatentShape(2, 24, torch.float16), state])
    assert storage.latents(0, 1).shape == (6, 4, 24)
    views = [storage.states(1, layer)[name] for layer in range(2) for name in ("scan", "conv")]
    assert [tuple(view.shape) for view in views] == [(3, 3, 5), (3, 4, 2)] * 2
    for number, view in enumerate(views):
        view.fill_(number)
    assert [view.unique().tolist() for view in views] == [[0.0], [1.0], [2.0], [3.0]]
    assert storage.pools["state"].block_nbytes == 2 * (3 * 5 * 4 + 4 * 2 * 2)


BESIDE = (Companion("indexer", 1, 6, torch.float32), Companion("scales", 2, 1, torch.float16))


@pytest.mark.parametrize("layout", ["BLKNHC", "BLHNC", "BLNHC"])
def test_every_element_has_one_place_beside_companions_too(layout: str) -> None:
    storage = storage_of(KeyValueShape(2, 3, 8, dtype=torch.float32, layout=layout, companions=BESIDE))
    pool = storage.pools["device"]
    assert pool.block_nbytes == 4 * (2 * 3 * 16 * 4 + 6 * 4 + 2 * 2)
    pool.device_bytes.fill_(0xFF)
    views = [storage.keys(0, 0), storage.keys(0, 1), storage.values(0, 0), storage.values(0, 1)]
    views += [storage.companion(0, "indexer", 0), storage.companion(0, "scales", 0), storage.companion(0, "scales", 1)]
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    assert [view.unique().tolist() for view in views] == [[float(number)] for number in range(1, 8)]
    assert not bool((pool.device_bytes.view(torch.int16) == -1).any()), "a byte belongs to no view"


def test_an_entry_stands_for_several_tokens() -> None:
    """Entries of 4 tokens, and of 8, in blocks of 8: two and one."""
    shape = LatentShape(2, 6, torch.float32, companions=(Companion("wide", 1, 10, torch.float32, 8),), ratio=4)
    storage = storage_of(shape, block_size=8)
    pool = storage.pools["device"]
    assert pool.block_nbytes == 4 * (2 * 2 * 6 + 10)
    pool.device_bytes.fill_(0xFF)
    views = [storage.latents(0, 0), storage.latents(0, 1), storage.companion(0, "wide", 0)]
    assert [tuple(view.shape) for view in views] == [(5, 2, 6), (5, 2, 6), (5, 1, 10)]
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    assert [view.unique().tolist() for view in views] == [[1.0], [2.0], [3.0]]
    assert not bool((pool.device_bytes.view(torch.int16) == -1).any()), "a byte belongs to no view"
    with pytest.raises(ConfigurationError, match="a block of 4 tokens has no whole number of entries of 8 tokens each"):
        storage_of(shape, block_size=4)


def test_a_companion_lies_behind_latents_in_the_layers_that_have_it() -> None:
    config = SpaceConfig((FullAttention(4),), num_blocks=6)
    storage = KVStorage(
        config, [LatentShape(3, 24, torch.float16, companions=(Companion("indexer", 2, 8, torch.float16),))]
    )
    view = storage.companion(0, "indexer", 1)
    assert view.shape == (6, 4, 8)
    assert view.stride() == (4 * (3 * 24 + 2 * 8), 8, 1)
    assert view.storage_offset() == 4 * (3 * 24 + 8)
    with pytest.raises(ConfigurationError, match=r"has the companions \['indexer'\], and no 'scales'"):
        storage.companion(0, "scales", 0)
    with pytest.raises(ConfigurationError, match="layer of companion 'indexer'"):
        storage.companion(0, "indexer", 2)


def states_of_jamba() -> StateShape:
    """Mamba: 8,192 channels of 16 numbers in float32, and the last four inputs of each."""
    tensors = (StateTensor("scan", (8192, 16), torch.float32), StateTensor("conv", (8192, 4), torch.bfloat16))
    return StateShape(28, tensors)


MODELS: dict[str, tuple[GroupShape, ...]] = {
    "llama-3.1-8b": (KeyValueShape(32, 8, 128),),
    "gemma-3-27b": (KeyValueShape(10, 16, 128), KeyValueShape(52, 16, 128)),
    "deepseek-v3": (LatentShape(61, 512 + 64),),
    "jamba-v0.1": (KeyValueShape(4, 8, 128), states_of_jamba()),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_models(name: str) -> None:
    """Full attention, windows, latents and states."""
    model = read_model(name)
    assert block_nbytes_of(groups_of(model, 16), MODELS[name]) == nbytes_of_model(model, 16)


@pytest.mark.parametrize("gib", [8, 40])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_bytes_are_those_of_a_replay(name: str, gib: int) -> None:
    """As ``pagedkv replay --model NAME --memory GIB`` counts them, and as memory is then allocated."""
    serving = pytest.importorskip("pagedkv.cli.serving", reason="the command line is not installed")
    options = serving.ServingOptions(model=name, memory=str(gib))
    replayed, _ = options.configuration(1000)
    model = read_model(name)
    groups = groups_of(model, 16)
    blocks = num_blocks_that_fit(
        groups, MODELS[name], gib * GIB, mean_tokens=1000, step_tokens=options.max_batched_tokens
    )
    assert blocks == replayed.num_blocks
    nbytes = block_nbytes_of(groups, MODELS[name])
    assert nbytes == replayed.block_nbytes
    taken = sum(blocks[pool] * nbytes[pool] for pool in blocks)
    assert gib * GIB - sum(nbytes.values()) < taken <= gib * GIB, "no pool could have had another block"
    few = dict.fromkeys(blocks, 3)
    storage = KVStorage(SpaceConfig(groups, num_blocks=few, max_tokens=64), MODELS[name])
    allocated = {pool: memory.device_bytes.untyped_storage().nbytes() for pool, memory in storage.pools.items()}
    assert allocated == {pool: 3 * nbytes[pool] for pool in blocks}


def test_where_nothing_fits_the_numbers_are_told() -> None:
    shape = KeyValueShape(32, 8, 128)
    with pytest.raises(ConfigurationError, match="leave 0 blocks of 2,097,152 bytes"):
        num_blocks_that_fit((FullAttention(16),), [shape], 2**20, mean_tokens=10, step_tokens=10)
    groups = (FullAttention(16), SlidingWindow(64, 16))
    with pytest.raises(ConfigurationError, match="2 groups share 1 pools"):
        num_blocks_that_fit(groups, [shape, shape], GIB, mean_tokens=10, step_tokens=10)
    with pytest.raises(DeviceUnavailableError, match="free memory is measured on a GPU alone"):
        free_nbytes("cpu")
    with pytest.raises(ConfigurationError, match=r"must be in \(0, 1\]"):
        free_nbytes("cpu", 1.5)
    with pytest.raises(ConfigurationError, match=r"needs .* bytes on cpu"):
        KVStorage(SpaceConfig((FullAttention(16),), num_blocks=2**31 - 1), [shape])


def test_sleep_gives_the_memory_back_and_views_live_on(device: torch.device) -> None:
    """At the same addresses, which views and graphs hold."""
    storage = storage_of(KeyValueShape(2, 3, 8, dtype=torch.float8_e4m3fn), device)
    keys, scales = storage.keys(0, 0), storage.scales(0)
    address = keys.data_ptr()
    scales.fill_(0.5)
    storage.sleep()
    assert not any(pool.is_awake for pool in storage.pools.values())
    storage.wake()
    assert storage.keys(0, 0).data_ptr() == keys.data_ptr() == address
    assert not bool(keys.view(torch.uint8)[0].any()), "the null block is zeros again"
    keys.view(torch.uint8)[-1] = 7
    assert bool((storage.keys(0, 0).view(torch.uint8)[-1] == 7).all())
    assert bool((storage.scales(0) == 0.5).all())
    storage.close()


def test_the_null_block_is_zeros_after_sleep_whatever_the_memory_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU maps zeros, a GPU what was there."""
    storage = storage_of(KeyValueShape(2, 3, 8), device)
    (pool,) = storage.pools.values()
    kind: Any = type(pool._memory)
    map_again = kind.map

    def map_garbage(memory: ReservedMemory) -> None:
        map_again(memory)
        pool.device_bytes.fill_(255)

    monkeypatch.setattr(kind, "map", map_garbage)
    storage.sleep()
    storage.wake()
    assert not bool(storage.keys(0, 0).view(torch.uint8)[0].any())
    assert bool(storage.keys(0, 0).view(torch.uint8)[1].all())


def test_the_null_block_is_zeros(device: torch.device) -> None:
    storage = storage_of(KeyValueShape(2, 3, 8, layout="LBKNHC"), device)
    for layer in range(2):
        assert not bool(storage.keys(0, layer)[0].any())
        assert not bool(storage.values(0, layer)[0].any())


def test_host_blocks_lie_where_the_caller_wants_them(device: torch.device) -> None:
    config = SpaceConfig((FullAttention(4),), num_blocks=5, num_host_blocks=3)
    shape = KeyValueShape(2, 3, 8, dtype=torch.float32)
    mine = torch.zeros(3 * shape.block_nbytes(4), dtype=torch.uint8, pin_memory=device.type == "cuda")
    storage = KVStorage(config, [shape], device, host_memory={"device": mine})
    storage.keys(0, 1)[2] = 7
    Transfers(storage).swap_out("device", [2], [1]).wait()
    host = mine.view(torch.float32).view(3, 2, 2, 4, 3, 8)
    assert bool((host[1, 1, 0] == 7).all())
    storage.close()
    assert bool((host[1, 1, 0] == 7).all()), "it is the caller's still"
