"""Tokens written to slots: Triton's kernel against the plain one, byte by byte."""

from typing import Literal, NamedTuple

import pytest
import torch

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device.kernels import reference
from pagedkv.device.kernels.inputs import TokenSide
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.device.shapes import KeyValueShape
from pagedkv.device.storage import KVStorage
from tests.device.kernels.suite import IS_INTERPRETED, KERNEL_DEVICE, byte_poison, needs_kernels, same_bytes

pytestmark = needs_kernels

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("BLKNHC", "LBKNHC", "BLHNC", "BLNHC")
SPECIAL = (0.0, -0.0, 1e-9, 447.0, 449.0, -1e6, float("inf"), float("-inf"))


class Size(NamedTuple):
    """Extents of what is written."""

    num_tokens: int
    num_heads: int
    dims: tuple[int, int]
    block_size: int


def storage_of(shape: KeyValueShape, device: torch.device, block_size: int) -> KVStorage:
    storage = KVStorage(SpaceConfig((FullAttention(block_size),), num_blocks=6), [shape], device)
    pool = storage.pools["device"].device_bytes
    pool.copy_(byte_poison(pool.numel(), dtype=torch.uint8))
    return storage


def exact(content: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor) -> torch.Tensor:
    """Round what is finite to multiples that a type holds: the interpreter rounds 31.6 to 16 in eight bits."""
    largest = torch.finfo(dtype).max
    rounded = content.clamp(-largest, largest).to(dtype).float() * scales[:, None]
    return torch.where(content.abs() > largest, content, rounded)


def sides_of(storage: KVStorage, contents: list[torch.Tensor], scales: torch.Tensor | None) -> list[TokenSide]:
    views = (storage.keys(0, 1), storage.values(0, 1))
    both = (None, None) if scales is None else scales.to(storage.device)
    return [
        TokenSide(content.to(storage.device), view, scale)
        for content, view, scale in zip(contents, views, both, strict=True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "size",
    [Size(0, 1, (4, 4), 2), Size(1, 1, (1, 1), 1), Size(7, 3, (8, 8), 4), Size(5, 2, (24, 40), 3)],
)
def test_each_token_goes_to_its_slot_and_nothing_else_changes(layout: str, dtype: torch.dtype, size: Size) -> None:
    num_tokens, num_heads, dims, block_size = size
    generator = torch.Generator().manual_seed(num_tokens)
    scaling: Literal["head", "tensor"] = "head" if num_tokens % 2 else "tensor"
    shape = KeyValueShape(2, num_heads, *dims, dtype=dtype, layout=layout, scaling=scaling)
    is_small = dtype.itemsize == 1
    contents = [torch.randn(num_tokens, num_heads, dim, generator=generator) * 100 for dim in dims]
    for content in contents:
        flat = content.flatten()
        flat[: len(SPECIAL)] = torch.tensor(SPECIAL)[: len(flat)]
    num_scales = num_heads if scaling == "head" else 1
    scales = torch.rand(2, num_scales, generator=generator) + 0.5 if is_small else None
    if scales is not None and IS_INTERPRETED:
        scales = 2.0 ** (torch.arange(scales.numel()) % 3 - 1).view_as(scales)
        contents = [exact(content, dtype, mine) for content, mine in zip(contents, scales, strict=True)]
    slots = torch.randperm(6 * block_size, generator=generator)[: num_tokens + 2]
    slots[2::3] = -1
    given = [content if is_small else content.to(dtype) for content in contents]
    plain, fast = storage_of(shape, torch.device("cpu"), block_size), storage_of(shape, KERNEL_DEVICE, block_size)
    reference.write_tokens(sides_of(plain, given, scales), slots)
    kernels_for(KERNEL_DEVICE, "triton").write_tokens(sides_of(fast, given, scales), slots.to(KERNEL_DEVICE))
    assert same_bytes(plain.pools["device"].device_bytes, fast.pools["device"].device_bytes)


def test_slots_that_do_not_exist_are_never_written() -> None:
    shape = KeyValueShape(2, 2, 8, dtype=torch.float32)
    storage = storage_of(shape, KERNEL_DEVICE, 4)
    before = storage.pools["device"].device_bytes.clone()
    content = torch.ones(3, 2, 8)
    slots = torch.tensor([-1, 24, 10**12], device=KERNEL_DEVICE)
    kernels_for(KERNEL_DEVICE, "triton").write_tokens(sides_of(storage, [content, content], None), slots)
    assert same_bytes(storage.pools["device"].device_bytes, before)


def test_tokens_may_have_any_strides() -> None:
    shape = KeyValueShape(2, 3, 8, dtype=torch.float32)
    plain, fast = storage_of(shape, torch.device("cpu"), 4), storage_of(shape, KERNEL_DEVICE, 4)
    packed = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(1)).permute(2, 1, 0)  # [tokens, heads, dim]
    slots = torch.tensor([3, 0, -1, 9, 23])
    reference.write_tokens(sides_of(plain, [packed, packed], None), slots)
    kernels_for(KERNEL_DEVICE, "triton").write_tokens(sides_of(fast, [packed, packed], None), slots.to(KERNEL_DEVICE))
    assert same_bytes(plain.pools["device"].device_bytes, fast.pools["device"].device_bytes)
