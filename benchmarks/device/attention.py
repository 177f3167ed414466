"""Figures of attention over blocks: what its kernels read, or multiply, a second; each answer is checked first.

Bytes are those of the keys and values that rows see, each counted once a row; work is that of the products of queries
with keys and of weights with values, of the keys that each query sees. A list of work is made once a step, for all
layers: it has a figure of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import torch

from benchmarks.device.timing import Figure, by_graph, figure
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import KeyValueShape, KVStorage, LatentShape
from pagedkv.device.kernels.inputs import AttentionTiling, PagedLayer, PagedRows, Reading, WorkList, tiling_for
from pagedkv.device.kernels.selection import kernels_for

__all__ = ["WORKLOADS", "Setup", "Workload", "attention_figures"]

NUM_RUNS: Final = 20
RUNS_A_GRAPH: Final = 4
NUM_SAMPLES: Final = 24
LARGEST_ERROR: Final = 0.012
"""Of an answer's norm, in bfloat16; tests are stricter, on shorter rows."""
CHUNK: Final = 2**28


@dataclass(frozen=True)
class Workload:
    """Rows that are all alike.

    Args:
        name: what it is called; bar: what it should reach, TB/s or TFLOP/s; None: it has none.
        num_rows, context: rows, and positions of each; num_queries: of these its last are computed.
        num_heads, num_key_heads, dims: of the layer; block_size, dtype: of what is stored.
        shared: positions that all rows have in common; is_latent: whether latents are stored.
        counts_work: whether the figure is work a second, rather than bytes.
        num_layers: layers that a graph answers in turn: more than one where one layer's keys would stay in a cache.
    """

    name: str
    bar: float | None
    num_rows: int
    context: int
    num_queries: int = 1
    num_heads: int = 32
    num_key_heads: int = 8
    dims: tuple[int, int] = (128, 128)
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    shared: int = 0
    is_latent: bool = False
    counts_work: bool = False
    num_layers: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that rows see."""
        heads = 1 if self.is_latent else self.num_key_heads
        dim = self.dims[0] if self.is_latent else sum(self.dims)
        return self.num_rows * self.context * heads * dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of the products."""
        first = self.context - self.num_queries
        num_seen = sum(range(first + 1, self.context + 1))
        return 2 * self.num_rows * num_seen * self.num_heads * sum(self.dims)


WORKLOADS: Final = (
    Workload("decode, 64 rows of 4,096", 3.8, 64, 4096),
    Workload("decode, 1 row of 1,104", None, 1, 1104, num_layers=36),
    Workload("decode, 8 rows of 131,072", 3.4, 8, 131_072),
    Workload("decode, 256 rows of 1,088", 3.6, 256, 1088),
    Workload("decode, 64 rows of 1,088", 3.6, 64, 1088),
    Workload("decode, 64 rows of 4,096, fp8", 2.8, 64, 4096, dtype=torch.float8_e4m3fn),
    Workload("prompts, 4 of 4,096", 400, 4, 4096, 4096, counts_work=True),
    Workload("a chunk of 2,048 behind 32,768", 300, 1, 34_816, 2048, counts_work=True),
    Workload("a question of 48 behind 16,384", None, 1, 16_432, 48),
    Workload("latents, 16 heads, 64 rows of 4,096", 2.5, 64, 4096, 1, 16, 1, (576, 512), is_latent=True),
    Workload(
        "latents, 128 heads, 64 rows of 4,096", 250, 64, 4096, 1, 128, 1, (576, 512), is_latent=True, counts_work=True
    ),
)
SHARING: Final = Workload("decode, 64 rows of 16,640, all their own", 3.5, 64, 16_640)
SHARED: Final = 16_384
TIMES_FASTER: Final = 3.0
LONGEST_ALONE: Final = 12.0
"""Microseconds of a layer of one row."""


@final
class Setup:
    """A workload in memory.

    Args:
        workload: which; tiling: how work is cut, None for the layer's own.
        shares: whether a shared prefix is read once.
    """

    def __init__(self, workload: Workload, tiling: AttentionTiling | None = None, *, shares: bool = False) -> None:
        self.workload = workload
        self.kernels = kernels_for(torch.device("cuda"), "triton")
        size, rows = workload.block_size, workload.num_rows
        own, common = (workload.context - workload.shared) // size, workload.shared // size
        num_blocks = 1 + common + rows * own
        layers = 1 + workload.num_layers  # the last ones, as those of a pool of many
        shape = (
            LatentShape(layers, workload.dims[0], dtype=workload.dtype)
            if workload.is_latent
            else KeyValueShape(layers, workload.num_key_heads, *workload.dims, dtype=workload.dtype)
        )
        self.storage = KVStorage(SpaceConfig((FullAttention(size),), num_blocks), [shape], "cuda")
        fill(self.storage.pool_of(0).device_bytes, workload.dtype)
        generator = torch.Generator().manual_seed(1)
        ids = 1 + torch.randperm(num_blocks - 1, generator=generator).int()
        tables = torch.cat([ids[:common].expand(rows, -1), ids[common:].view(rows, own)], dim=1)
        lengths = torch.full((rows,), workload.context, dtype=torch.int32)
        offsets = torch.arange(rows + 1, dtype=torch.int32) * workload.num_queries
        parts = (tables, lengths - workload.num_queries, lengths, offsets)
        self.rows = PagedRows(*(part.contiguous().cuda() for part in parts))
        self.layers = [self._layer(number) for number in range(1, layers)]
        self.layer = self.layers[0]
        self.query = torch.randn(rows * workload.num_queries, workload.num_heads, workload.dims[0], device="cuda")
        self.query = self.query.bfloat16()
        self.out = torch.empty(*self.query.shape[:2], workload.dims[1], device="cuda", dtype=torch.bfloat16)
        self.cut(tiling, shares=shares)

    def cut(self, tiling: AttentionTiling | None, *, shares: bool = False) -> None:
        """List the work anew, cut otherwise."""
        workload = self.workload
        reading = Reading(workload.num_heads // self.layer.keys.shape[2])
        self.work = WorkList(
            reading,
            max_places=workload.num_rows,
            max_tokens=len(self.query),
            max_length=workload.context,
            num_heads=workload.num_heads,
            value_dim=workload.dims[1],
            shares=shares,
            tiling=tiling or tiling_for(self.layer, reading),
            device="cuda",
        )
        self.list_work()

    def list_work(self) -> None:
        """List the work of the step."""
        self.kernels.list_work(self.work, self.rows, self.workload.block_size)

    def attend(self, number: int = 0) -> None:
        """Answer all queries of a layer."""
        layer, has_prompts = self.layers[number], self.workload.num_queries > 1
        self.kernels.attend_rows(self.work, layer, self.rows, self.query, self.out, has_prompts=has_prompts)

    def error(self) -> float:
        """Answer over poison; how far some answers are off, of their norm, against float32 written out."""
        self.out.fill_(torch.nan)
        self.attend()
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(len(self.query), (NUM_SAMPLES,), generator=generator).tolist()
        return max(self._error_of(token) for token in {0, len(self.query) - 1, *tokens})

    def times(self, num_runs: int = NUM_RUNS) -> list[float]:
        """Time the answers of one layer, in microseconds."""
        runs = [partial(self.attend, number) for number in range(self.workload.num_layers)]
        return by_graph(runs if len(runs) > 1 else runs * RUNS_A_GRAPH, num_runs)

    def _layer(self, number: int) -> PagedLayer:
        scale = self.workload.dims[0] ** -0.5
        if self.workload.is_latent:
            keys = self.storage.latents(0, number)[:, :, None]
            return PagedLayer(keys, keys[..., : self.workload.dims[1]], scale)
        scales = self.storage.scales(0)[number] if self.workload.dtype.itemsize == 1 else (None, None)
        return PagedLayer(self.storage.keys(0, number), self.storage.values(0, number), scale, 0.0, *scales)

    def _error_of(self, token: int) -> float:
        place, index = divmod(token, self.workload.num_queries)
        num_seen = self.workload.context - self.workload.num_queries + index + 1
        position = torch.arange(num_seen, device="cuda")
        block, offset = self.rows.block_tables[place].long()[position // 16], position % 16
        shared = self.work.reading.heads_of_key
        keys, values = (
            _gathered(side, block, offset).float().repeat_interleave(shared, 1)
            for side in (self.layer.keys, self.layer.values)
        )
        scores = torch.einsum("hd,khd->hk", self.query[token].float(), keys) * self.layer.scale
        expected = torch.einsum("hk,khd->hd", scores.softmax(1), values)
        return float((self.out[token].float() - expected).norm() / expected.norm())


def _gathered(blocks: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    if blocks.dtype.itemsize == 1:
        return blocks.view(torch.uint8)[block, offset].view(blocks.dtype)
    return blocks[block, offset]


def fill(pool: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill a pool with normal numbers."""
    typed = pool.view(dtype)
    for part in typed.split(CHUNK):
        part.copy_(torch.randn(part.shape, device=part.device, dtype=torch.bfloat16))


def attention_figures() -> Iterator[Figure]:
    """Measure them all."""
    for workload in WORKLOADS:
        setup = Setup(workload)
        require_right(setup)
        times = setup.times()
        yield figure(workload.name, times, bar=LONGEST_ALONE) if workload.num_layers > 1 else rate(workload, times)
        if workload is WORKLOADS[0]:
            yield figure("list of work of 64 rows of 4,096, for all layers", by_graph([setup.list_work] * 4, NUM_RUNS))
        del setup
    yield from sharing_figures()


def sharing_figures() -> Iterator[Figure]:
    """Measure rows behind a shared prefix with a kernel that uses the sharing, and with one that does not."""
    setup = Setup(SHARING)
    require_right(setup)
    own = setup.times()
    yield rate(SHARING, own)
    del setup
    workload = replace(SHARING, name="decode, 64 rows behind 16,384 shared tokens, by the plain kernel", shared=SHARED)
    setup = Setup(workload)
    require_right(setup)
    plain = setup.times()
    yield rate(workload, plain)
    setup.cut(None, shares=True)
    require_right(setup)
    times = setup.times()
    yield figure("the same, read once", times)
    faster = [sum(plain) / len(plain) / each for each in times]
    yield figure("the same: the plain kernel's time / its own", faster, "", bar=TIMES_FASTER, is_least=True)


def rate(workload: Workload, times: list[float]) -> Figure:
    """Return the bytes that were read, or the products that were computed, a second."""
    amount = workload.flops if workload.counts_work else workload.nbytes
    unit = "TFLOP/s" if workload.counts_work else "TB/s"
    return figure(workload.name, [amount / each / 1e6 for each in times], unit, bar=workload.bar, is_least=True)


def require_right(setup: Setup) -> None:
    """Refuse to time a wrong answer."""
    error = setup.error()
    assert error < LARGEST_ERROR, f"{setup.workload.name}: {error:.4f} off"
