"""Sequences of any lengths in a storage whose free blocks are poisoned, and what they should read there."""

from dataclasses import dataclass

import torch

from pagedkv.attention import GroupMetadata, StepMetadata
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import KeyValueShape, KVStorage

__all__ = ["Case", "paged_case"]


@dataclass(frozen=True)
class Case:
    """A storage of one group, and a step over it.

    Args:
        storage: the storage; layers 0 and 1 of its group hold different keys.
        step: the step; its own keys are in the storage already.
        query: ``[tokens, heads, key_dim]``.
    """

    storage: KVStorage
    step: StepMetadata
    query: torch.Tensor


def paged_case(  # noqa: PLR0913 - a case has as many sides
    ranges: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_key_heads: int = 2,
    dims: tuple[int, int] = (8, 8),
    block_size: int = 4,
    first_kept: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Lay sequences out in shuffled blocks.

    Args:
        ranges: the positions that each computes; its keys before them are there.
        num_heads, num_key_heads, dims: of the layers.
        block_size: tokens a block.
        first_kept: blocks wholly below this position are null blocks, as where a window moved on.
        dtype: of keys and queries.
        seed: of numbers and places.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-stop // block_size) for _, stop in ranges]
    num_blocks = 2 * sum(counts) + 3
    config = SpaceConfig((FullAttention(block_size),), num_blocks)
    shape = KeyValueShape(2, num_key_heads, *dims, dtype=dtype)
    storage = KVStorage(config, [shape])
    pool = storage.pool_of(0).device_bytes
    pool[storage.pool_of(0).block_nbytes :] = 255  # NaN in every type
    block_ids = 1 + torch.randperm(num_blocks - 1, generator=generator)
    width = max(counts) + 1
    tables = torch.zeros(len(ranges), width, dtype=torch.int32)
    slots: list[int] = []
    taken = 0
    for place, ((start, stop), count) in enumerate(zip(ranges, counts, strict=True)):
        kept = min(first_kept, start) // block_size
        tables[place, kept:count] = block_ids[taken + kept : taken + count].int()
        taken += count
        for position in range(kept * block_size, stop):
            block, offset = int(tables[place, position // block_size]), position % block_size
            for layer in range(2):
                for side in (storage.keys(0, layer), storage.values(0, layer)):
                    side[block, offset] = torch.randn(side.shape[2:], generator=generator).to(dtype)
            if position >= start:
                slots.append(block * block_size + offset)
    offsets = torch.tensor([0, *[stop - start for start, stop in ranges]]).cumsum(0).int()
    group = GroupMetadata(
        tables,
        torch.tensor([start for start, _ in ranges]).int(),
        torch.tensor([stop for _, stop in ranges]).int(),
        offsets,
        torch.tensor(slots),
    )
    query = torch.randn(int(offsets[-1]), num_heads, dims[0], generator=generator).to(dtype)
    return Case(storage, StepMetadata((group,), len(ranges), int(offsets[-1])), query)
