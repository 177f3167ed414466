"""Rows of any lengths over a storage that is NaN wherever they have nothing, and what each query should answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device.kernels.inputs import AttentionTiling, PagedLayer, PagedRows, Reading, WorkList
from pagedkv.device.shapes import FP8_TYPES, KeyValueShape, LatentShape
from pagedkv.device.storage import KVStorage

__all__ = ["SMALL", "Case", "Memory", "answers", "make_case", "work_of"]

SMALL = AttentionTiling(
    key_tile=16,
    span_tiles=1,
    most_spans=4,
    warps=1,
    query_rows=16,
    query_keys=16,
    query_warps=1,
    query_registers=0,
    shared_span=16,
    chunk_queries=12,
    chunk_span=16,
    most_chunk_spans=3,
    chunk_partials=30,
)
"""Small enough that short rows have several tiles, spans and items, and long ones have wider spans."""


@dataclass(frozen=True)
class Memory:
    """What is stored, and how.

    Args:
        num_heads, num_key_heads: of the layer; dims: of keys and values; values of latents are their first dimensions.
        block_size, dtype, layout, scaling: of the storage; is_latent: whether it holds latents.
        query_dtype: of queries; None: what is stored.
    """

    num_heads: int = 4
    num_key_heads: int = 2
    dims: tuple[int, int] = (16, 16)
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    layout: str = "BLKNHC"
    scaling: Literal["tensor", "head"] = "tensor"
    is_latent: bool = False
    query_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Case:
    """Rows, a layer, and queries."""

    memory: Memory
    storage: KVStorage
    layer: PagedLayer
    rows: PagedRows
    query: torch.Tensor
    ranges: tuple[tuple[int, int], ...]

    def alone(self, place: int) -> "Case":
        """The same with one row alone."""
        start, stop = self.ranges[place]
        token = int(self.rows.query_start_loc[place])
        offsets = torch.tensor([0, stop - start], dtype=torch.int32, device=self.query.device)
        some = slice(place, place + 1)
        rows = PagedRows(self.rows.block_tables[some], self.rows.starts[some], self.rows.seq_lens[some], offsets)
        return replace(self, rows=rows, query=self.query[token : token + stop - start], ranges=(self.ranges[place],))


def make_case(  # noqa: PLR0913 - a case has as many sides
    ranges: Sequence[tuple[int, int]],
    memory: Memory,
    *,
    device: torch.device,
    shared: int = 0,
    first_kept: int = 0,
    seed: int = 0,
) -> Case:
    """Lay rows out in shuffled blocks.

    Args:
        ranges: the positions that each row computes; its keys up to the last are there.
        memory: what is stored.
        shared: positions whose blocks all rows have in common with the first.
        first_kept: blocks wholly below this position are null blocks, as where a window moved on.
    """
    generator = torch.Generator().manual_seed(seed)
    size = memory.block_size
    counts = [-(-stop // size) for _, stop in ranges]
    num_blocks = 2 * sum(counts) + 3
    storage = KVStorage(SpaceConfig((FullAttention(size),), num_blocks), [_shape(memory)], device)
    storage.pool_of(0).device_bytes.fill_(255)  # NaN in every type, the null block too: it is never read
    layer = _layer(storage, memory, generator)
    block_ids = 1 + torch.randperm(num_blocks - 1, generator=generator)
    tables = torch.randint(num_blocks, (len(ranges), max(counts) + 2), generator=generator).int()
    taken = 0
    for place, ((start, _), count) in enumerate(zip(ranges, counts, strict=True)):
        tables[place, :count] = block_ids[taken : taken + count].int()
        if place:
            tables[place, : shared // size] = tables[0, : shared // size]
        tables[place, : min(first_kept, start) // size] = 0
        taken += count
    for place, (start, stop) in enumerate(ranges):
        kept = min(first_kept, start) // size * size
        _fill(layer, tables[place], kept if not place else max(kept, shared // size * size), stop, memory, generator)
    lengths = [stop - start for start, stop in ranges]
    rows = PagedRows(
        tables.to(device),
        torch.tensor([start for start, _ in ranges]).int().to(device),
        torch.tensor([stop for _, stop in ranges]).int().to(device),
        torch.tensor([0, *lengths]).cumsum(0).int().to(device),
    )
    query = torch.randn(sum(lengths), memory.num_heads, memory.dims[0], generator=generator)
    query = query.to(memory.query_dtype or memory.dtype).to(device)
    return Case(memory, storage, layer, rows, query, tuple(ranges))


def work_of(
    case: Case, reading: Reading, tiling: AttentionTiling = SMALL, *, few: int = 1, shares: bool = False
) -> WorkList:
    """An empty list, big enough."""
    return WorkList(
        reading,
        max_places=max(5, len(case.ranges)),
        max_tokens=len(case.query) + 3,
        max_length=max(stop for _, stop in case.ranges) + 5,
        num_heads=case.memory.num_heads,
        value_dim=case.layer.values.shape[3],
        few_queries=few,
        shares=shares,
        tiling=tiling,
        device=case.query.device,
    )


def answers(case: Case, reading: Reading, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """What each query should answer, one query and head at a time, in double precision."""
    keys, values = (
        _numbers(case.layer.keys, case.layer.key_scales),
        _numbers(case.layer.values, case.layer.value_scales),
    )
    size, query = case.memory.block_size, case.query.cpu().double()
    out: list[torch.Tensor] = []
    for place, (start, stop) in enumerate(case.ranges):
        table = case.rows.block_tables[place].cpu()
        for position in range(start, stop):
            seen = [past for past in range(position + 1) if _sees(reading, position, past)]
            block, offset = table[torch.tensor(seen) // size].long(), torch.tensor(seen) % size
            for head in range(case.memory.num_heads):
                key_head = head // reading.heads_of_key
                scores = (
                    keys[block, offset, key_head] @ query[len(out) // case.memory.num_heads, head] * case.layer.scale
                )
                if case.layer.soft_cap:
                    scores = case.layer.soft_cap * (scores / case.layer.soft_cap).tanh()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].cpu().double()[None]])
                weights = scores.softmax(0)[: len(seen)]
                out.append(weights @ values[block, offset, key_head])
    return torch.stack(out).view(len(query), case.memory.num_heads, -1)


def _sees(reading: Reading, position: int, past: int) -> bool:
    if reading.window and past <= position - reading.window and past >= reading.num_sink_tokens:
        return False
    return not reading.chunk or past // reading.chunk == position // reading.chunk


def _shape(memory: Memory) -> KeyValueShape | LatentShape:
    if memory.is_latent:
        return LatentShape(2, memory.dims[0], dtype=memory.dtype)
    return KeyValueShape(
        2, memory.num_key_heads, *memory.dims, dtype=memory.dtype, layout=memory.layout, scaling=memory.scaling
    )


def _layer(storage: KVStorage, memory: Memory, generator: torch.Generator) -> PagedLayer:
    if memory.is_latent:
        keys = storage.latents(0, 1)[:, :, None]
        scale = _scales(storage, memory, generator)[0]
        return PagedLayer(keys, keys[..., : memory.dims[1]], 0.3, 0.0, scale, scale)
    return PagedLayer(storage.keys(0, 1), storage.values(0, 1), 0.3, 0.0, *_scales(storage, memory, generator))


def _scales(
    storage: KVStorage, memory: Memory, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Give eight bits scales of their own; of keys, and of values."""
    if memory.dtype not in FP8_TYPES:
        return None, None
    given = storage.scales(0)
    given.copy_(2.0 ** torch.randint(-1, 2, given.shape, generator=generator))
    return given[1][0], given[1][-1]


def _fill(  # noqa: PLR0913, PLR0917 - as above
    layer: PagedLayer, table: torch.Tensor, start: int, stop: int, memory: Memory, generator: torch.Generator
) -> None:
    position = torch.arange(min(start, stop), stop)
    block, offset = table[position // memory.block_size].long(), position % memory.block_size
    for side in (layer.keys,) if memory.is_latent else (layer.keys, layer.values):
        content = torch.randn(len(position), *side.shape[2:], generator=generator).to(memory.dtype).to(side.device)
        is_small = side.dtype.itemsize == 1  # eight-bit types have no indexing of their own
        target, source = (side.view(torch.uint8), content.view(torch.uint8)) if is_small else (side, content)
        target[block.to(side.device), offset.to(side.device)] = source


def _numbers(blocks: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    plain = blocks.cpu().double()
    return plain if scales is None else plain * scales.cpu().double()[:, None]
