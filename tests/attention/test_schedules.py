"""The back ends of a CPU and of a GPU, driven with the same calls: random steps of rows that come, grow and go.

In a step some rows decode, some with drafts of which some are refused later, some compute a chunk of a prompt, some
nothing. Every layer writes and attends; what both answer, and what both hold, is compared. Where there is no GPU the
other side is plain torch, or Triton's interpreter (tests/device/test_interpreted.py).
"""

from dataclasses import dataclass, field, fields, replace
from random import Random

import pytest
import torch

from pagedkv.attention import (
    AttentionBackend,
    AttentionLayer,
    CPUBackend,
    GroupMetadata,
    StepMetadata,
    TritonBackend,
)
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention, SlidingWindow
from pagedkv.device import GroupShape, KeyValueShape, KVStorage, LatentShape
from pagedkv.device.kernels.inputs import AttentionTiling
from tests.device.kernels.suite import IS_INTERPRETED, KERNEL_DEVICE

pytestmark = pytest.mark.interpreted

TOLERANCE = 2e-5
ARRAYS = [each.name for each in fields(GroupMetadata) if each.name != "known"]
TINY_TILING = AttentionTiling(
    key_tile=16, span_tiles=1, most_spans=4, query_rows=16, query_keys=16, query_warps=4, query_registers=0
)


@dataclass(frozen=True)
class Sizes:
    """How large rows and layers are.

    Args:
        num_heads, num_key_heads, dims, latent_dims: of layers; block_size, window, chunk: of groups.
        num_rows, longest, chunk_tokens, num_draft: of rows; num_steps: of a schedule.
    """

    num_heads: int = 4
    num_key_heads: int = 2
    dims: tuple[int, int] = (16, 8)
    latent_dims: tuple[int, int] = (24, 16)
    block_size: int = 4
    window: int = 11
    chunk: int = 13
    num_rows: int = 4
    longest: int = 60
    chunk_tokens: int = 12
    num_draft: int = 3
    num_steps: int = 4 if IS_INTERPRETED else 12
    tiling: AttentionTiling | None = TINY_TILING


TINY = Sizes()
REAL = Sizes(16, 4, (128, 128), (192, 128), 16, 200, 300, 12, 1500, 400, 4, 12, None)


def layers_of(sizes: Sizes) -> list[AttentionLayer]:
    """Layers of three groups: all positions, a window, latents. The first two read the same keys."""
    heads, scale = sizes.num_heads, sizes.dims[0] ** -0.5
    return [
        AttentionLayer(0, 0, heads, scale),
        AttentionLayer(0, 0, heads, 2 * scale, chunk=sizes.chunk),
        AttentionLayer(0, 1, heads, scale, soft_cap=0.5, has_sinks=True),
        AttentionLayer(1, 0, heads, scale, window=sizes.window),
        AttentionLayer(1, 1, heads, scale, window=sizes.window, soft_cap=0.7, has_sinks=True),
        AttentionLayer(2, 0, heads, scale, is_latent=True),
    ]


WRITERS = (0, 2, 3, 4)
"""Layers that keep keys, but latents."""


@dataclass
class Row:
    """A sequence: its blocks, which stay its own, and how long it is."""

    blocks: list[int]
    length: int = 0


@dataclass
class Schedule:
    """Random steps over rows.

    Args:
        sizes: how large; seed: of everything.
    """

    sizes: Sizes
    seed: int
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Give each row blocks in a random order."""
        self.random = Random(self.seed)
        self.width = -(-self.sizes.longest // self.sizes.block_size)
        ids = list(range(1, 1 + self.width * self.sizes.num_rows))
        self.random.shuffle(ids)
        self.rows = [Row(ids[row * self.width :][: self.width]) for row in range(self.sizes.num_rows)]
        self.num_blocks = 1 + len(ids)

    def step(self) -> list[tuple[int, int]]:
        """Choose what each row computes: the range of its positions. Rows that are full begin anew."""
        ranges = []
        for row in self.rows:
            if row.length and self.random.random() < 0.2:  # drafts were refused
                row.length -= self.random.randrange(min(row.length, self.sizes.num_draft + 1))
            kinds = [0, 1, 1 + self.random.randint(0, self.sizes.num_draft)]
            count = self.random.choice([*kinds, self.random.randrange(1, self.sizes.chunk_tokens)])
            if row.length == 0:
                count = self.random.randrange(self.sizes.chunk_tokens)
            elif row.length + count > self.sizes.longest:
                row.length = 0
            ranges.append((row.length, row.length + count))
            row.length += count
        return ranges

    def metadata(self, ranges: list[tuple[int, int]]) -> StepMetadata:
        """Describe a step; blocks that the window has left are null blocks in its group."""
        size = self.sizes.block_size
        tables = torch.tensor([row.blocks for row in self.rows]).int()
        starts, stops = (torch.tensor([each[side] for each in ranges]).int() for side in (0, 1))
        offsets = torch.cat([torch.zeros(1), (stops - starts).cumsum(0)]).int()
        slots = [
            row.blocks[position // size] * size + position % size
            for row, (start, stop) in zip(self.rows, ranges, strict=True)
            for position in range(start, stop)
        ]
        left = (starts - self.sizes.window + 1).clamp(min=0) // size
        windowed = torch.where(torch.arange(self.width) < left[:, None], 0, tables)
        groups = [
            GroupMetadata(each, starts, stops, offsets, torch.tensor(slots)) for each in (tables, windowed, tables)
        ]
        return StepMetadata(groups, len(ranges), len(slots))


def storage_of(schedule: Schedule, device: torch.device, dtype: torch.dtype = torch.float32) -> KVStorage:
    """Build a storage in which all is NaN, the null block too."""
    sizes = schedule.sizes
    specs = (
        FullAttention(sizes.block_size, pool="full"),
        SlidingWindow(sizes.window, sizes.block_size, pool="window"),
        FullAttention(sizes.block_size, pool="latent"),
    )
    keys = KeyValueShape(2, sizes.num_key_heads, *sizes.dims, dtype=dtype)
    shapes: list[GroupShape] = [keys, keys, LatentShape(1, sizes.latent_dims[0], dtype=dtype)]
    storage = KVStorage(SpaceConfig(specs, {spec.pool: schedule.num_blocks for spec in specs}), shapes, device)
    for pool in storage.pools.values():
        pool.device_bytes.fill_(255)
    return storage


@dataclass(frozen=True)
class Side:
    """One back end over a storage of its own."""

    storage: KVStorage
    backend: AttentionBackend
    device: torch.device

    def step(self, step: StepMetadata) -> StepMetadata:
        """Describe a step where the back end runs."""
        groups = tuple(
            GroupMetadata(*(getattr(group, name).to(self.device) for name in ARRAYS)) for group in step.groups
        )
        return StepMetadata(groups, step.num_places, step.num_tokens)

    def content(self) -> list[torch.Tensor]:
        """Tell what its pools hold."""
        return [pool.device_bytes.cpu() for pool in self.storage.pools.values()]


def sides_of(schedule: Schedule, layers: list[AttentionLayer], believed: list[AttentionLayer]) -> tuple[Side, Side]:
    """Build both back ends; the GPU's takes the layers for those that are believed."""
    sizes, cpu = schedule.sizes, torch.device("cpu")
    here, there = storage_of(schedule, cpu), storage_of(schedule, KERNEL_DEVICE)
    backend = TritonBackend(
        there,
        believed,
        max_places=sizes.num_rows,
        max_tokens=sizes.num_rows * sizes.chunk_tokens,
        max_length=sizes.longest,
        latent_dim=sizes.latent_dims[1],
        query_dtype=torch.float32,
        num_draft=sizes.num_draft,
        tiling=sizes.tiling,
        kernels="triton" if IS_INTERPRETED else "auto",
    )
    return Side(here, CPUBackend(here, layers, latent_dim=sizes.latent_dims[1]), cpu), Side(
        there, backend, KERNEL_DEVICE
    )


def drive(sizes: Sizes, seed: int, layers: list[AttentionLayer], believed: list[AttentionLayer] | None = None) -> None:
    """Give both back ends the same steps, and compare what they answer, and what they hold in the end."""
    schedule = Schedule(sizes, seed)
    sides = sides_of(schedule, layers, believed or layers)
    generator = torch.Generator().manual_seed(seed)
    for number in range(sizes.num_steps):
        ranges = schedule.step()
        step = schedule.metadata(ranges)
        if not step.num_tokens:
            continue
        for index, layer in enumerate(layers):
            draws = draws_of(index, layer, sizes, ranges, generator)
            expected, found = (answers(side, index, layer, step, draws) for side in sides)
            for what, each in expected.items():
                assert not each.isnan().any()
                difference = float((found[what].cpu() - each).abs().max())
                assert difference < TOLERANCE * (1 + float(each.abs().max())), (number, index, what, ranges)
    for here, there in zip(*(side.content() for side in sides), strict=True):
        assert torch.equal(there, here)


def draws_of(
    index: int, layer: AttentionLayer, sizes: Sizes, ranges: list[tuple[int, int]], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Draw what a layer is given in a step."""
    count = sum(stop - start for start, stop in ranges)
    num_seen = sum(stop - layer.first_seen(start) for start, stop in ranges if start < stop)
    key_dim, value_dim = sizes.dims
    shapes: dict[str, tuple[int, ...]] = {"query": (count, sizes.num_heads, key_dim)}
    if layer.is_latent:
        shapes["latent"] = (count, sizes.latent_dims[0])
        shapes["absorbed"] = (count, sizes.num_heads, sizes.latent_dims[0])
        shapes["key"] = (num_seen, sizes.num_heads, key_dim)
        shapes["value"] = (num_seen, sizes.num_heads, value_dim)
    elif index in WRITERS:
        shapes["key"] = (count, sizes.num_key_heads, key_dim)
        shapes["value"] = (count, sizes.num_key_heads, value_dim)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def answers(
    side: Side, index: int, layer: AttentionLayer, step: StepMetadata, draws: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write, and attend in each way that the layer knows."""
    step, backend = side.step(step), side.backend
    given = {name: draw.to(side.device) for name, draw in draws.items()}
    if layer.is_latent:
        backend.write_latents(index, given["latent"], step)
        return {
            "latents": backend.attend_latents(index, given["absorbed"], step),
            "unfolded": backend.attend_unfolded(index, given["query"], given["key"], given["value"], step),
        }
    if "key" in given:
        backend.write(index, given["key"], given["value"], step)
    sinks = torch.linspace(-1, 1, layer.num_heads, device=side.device) if layer.has_sinks else None
    return {"keys": backend.attend(index, given["query"], step, sinks=sinks)}


@pytest.mark.parametrize("seed", range(1 if IS_INTERPRETED else 6))
def test_both_back_ends_answer_alike(seed: int) -> None:
    drive(TINY, seed, layers_of(TINY))


if not IS_INTERPRETED:  # which takes a second where a GPU takes a microsecond

    @pytest.mark.parametrize(
        "sizes",
        [
            replace(TINY, num_heads=6, num_key_heads=1, dims=(5, 3), block_size=3, latent_dims=(7, 5)),
            replace(TINY, num_heads=2, num_key_heads=2, dims=(8, 24), block_size=8, num_draft=0, chunk_tokens=31),
            replace(TINY, num_rows=1, num_draft=1, window=1, chunk=2, longest=200),
        ],
        ids=["one key head", "no drafts", "one row"],
    )
    def test_of_other_sizes_too(sizes: Sizes) -> None:
        drive(sizes, 0, layers_of(sizes))

    @pytest.mark.parametrize(
        ("index", "change"),
        [(3, {"window": 10}), (1, {"chunk": 12}), (2, {"soft_cap": 0.0}), (0, {"scale": 0.3}), (0, {"index": 1})],
        ids=str,
    )
    def test_a_layer_that_is_taken_for_another_is_noticed(index: int, change: dict[str, int]) -> None:
        """Negative control."""
        layers = layers_of(TINY)
        believed = [replace(layer, **change) if at == index else layer for at, layer in enumerate(layers)]  # type: ignore[arg-type]
        with pytest.raises(AssertionError):
            drive(TINY, 0, layers, believed)


if KERNEL_DEVICE.type != "cpu":  # too large for anything but a GPU

    @pytest.mark.parametrize("seed", range(3))
    def test_so_they_do_at_the_size_of_models(seed: int) -> None:
        drive(REAL, seed, layers_of(REAL))
