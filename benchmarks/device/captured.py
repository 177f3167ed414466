"""Figures of one graph that holds a step's list of work, all layers' writes and attention, and its draws.

It is captured with short rows and replayed with others: ranges are read on the device. What it answers then is what the
same calls answer eagerly, bit by bit, before anything is timed.
"""

from collections.abc import Iterator, Sequence
from typing import Final, final

import torch

from benchmarks.device.attention import fill
from benchmarks.device.timing import Figure, elapsed_us, figure
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import KeyValueShape, KVStorage
from pagedkv.device.kernels.inputs import Draws, PagedLayer, PagedRows, Reading, TokenSide, WorkList, tiling_for
from pagedkv.device.kernels.selection import kernels_for

__all__ = ["captured_figures"]

NUM_LAYERS: Final = 8
NUM_ROWS: Final = 64
CONTEXT: Final = 4096
BLOCK_SIZE: Final = 16
NUM_HEADS: Final = 32
NUM_KEY_HEADS: Final = 8
DIM: Final = 128
NUM_TOKENS: Final = 128_256
CHUNK: Final = 512
MOST_TOKENS: Final = NUM_ROWS + CHUNK
NUM_RUNS: Final = 20


@final
class Step:
    """A step in buffers of ``MOST_TOKENS`` tokens, and the graph of it."""

    def __init__(self) -> None:
        self.kernels = kernels_for(torch.device("cuda"), "triton")
        shape = KeyValueShape(NUM_LAYERS, NUM_KEY_HEADS, DIM, dtype=torch.bfloat16)
        width = CONTEXT // BLOCK_SIZE
        self.storage = KVStorage(SpaceConfig((FullAttention(BLOCK_SIZE),), 1 + NUM_ROWS * width), [shape], "cuda")
        fill(self.storage.pool_of(0).device_bytes, torch.bfloat16)
        generator = torch.Generator().manual_seed(1)
        self.tables = (1 + torch.randperm(NUM_ROWS * width, generator=generator).int()).view(NUM_ROWS, width).cuda()
        places = torch.zeros(NUM_ROWS, dtype=torch.int32, device="cuda")
        self.rows = PagedRows(self.tables, places, places.clone(), places.new_zeros(NUM_ROWS + 1))
        self.slots = torch.zeros(MOST_TOKENS, dtype=torch.int64, device="cuda")
        self.query = torch.randn(MOST_TOKENS, NUM_HEADS, DIM, device="cuda").bfloat16()
        self.key, self.value = torch.randn(2, MOST_TOKENS, NUM_KEY_HEADS, DIM, device="cuda").bfloat16()
        self.layers = [
            PagedLayer(self.storage.keys(0, layer), self.storage.values(0, layer), DIM**-0.5)
            for layer in range(NUM_LAYERS)
        ]
        reading = Reading(NUM_HEADS // NUM_KEY_HEADS)
        self.work = WorkList(
            reading,
            max_places=NUM_ROWS,
            max_tokens=MOST_TOKENS,
            max_length=CONTEXT,
            num_heads=NUM_HEADS,
            value_dim=DIM,
            tiling=tiling_for(self.layers[0], reading),
            device="cuda",
        )
        self.out = torch.zeros(NUM_LAYERS, *self.query.shape, device="cuda", dtype=torch.bfloat16)
        self.scores = 2 * torch.randn(NUM_ROWS, NUM_TOKENS, device="cuda")
        self.drawn, self.greatest = (
            torch.zeros(NUM_ROWS, dtype=torch.int64, device="cuda"),
            torch.zeros(NUM_ROWS, device="cuda"),
        )
        self.positions = torch.zeros(NUM_ROWS, dtype=torch.int64, device="cuda")
        ones = torch.ones(NUM_ROWS, device="cuda")
        self.draws = Draws(0.8 * ones, ones * -torch.inf, self.positions * 0 + 7, self.positions * 0, self.positions)

    def set(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Let rows compute these positions; returns how many keys they see."""
        starts, stops = (torch.tensor([each[side] for each in ranges], dtype=torch.int32) for side in (0, 1))
        self.rows.starts.copy_(starts)
        self.rows.seq_lens.copy_(stops)
        self.positions.copy_(stops)
        self.rows.query_start_loc[1:].copy_(torch.cumsum(stops - starts, 0))
        slots = [
            self.tables[place, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
            for place, (start, stop) in enumerate(ranges)
            for position in (torch.arange(start, stop, device="cuda"),)
        ]
        flat = torch.cat(slots)
        self.slots.fill_(-1)[: len(flat)].copy_(flat)
        return int(stops[starts < stops].sum())

    def run(self) -> None:
        """Launch the step, kernel by kernel."""
        self.kernels.list_work(self.work, self.rows, BLOCK_SIZE)
        for layer, out in zip(self.layers, self.out, strict=True):
            sides = [TokenSide(self.key, layer.keys, None), TokenSide(self.value, layer.values, None)]
            self.kernels.write_tokens(sides, self.slots)
            self.kernels.attend_rows(self.work, layer, self.rows, self.query, out)
        self.kernels.draw_tokens(self.draws, self.scores, self.drawn, self.greatest)

    def capture(self) -> torch.cuda.CUDAGraph:
        """Capture what :meth:`run` launches."""
        self.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


def captured_figures() -> Iterator[Figure]:
    """Measure a graph that was captured with rows of 17 tokens."""
    step = Step()
    step.set([(16, 17)] * NUM_ROWS)
    graph = step.capture()
    full, none = (CONTEXT - 1, CONTEXT), (0, 0)
    kinds = {
        "64 rows of 4,096": [full] * NUM_ROWS,
        "32 rows of 4,096 and 32 of none": [full, none] * (NUM_ROWS // 2),
        "64 rows of 1": [(0, 1)] * NUM_ROWS,
        "63 rows of 4,096 and a chunk of 512": [full] * (NUM_ROWS - 1) + [(CONTEXT - CHUNK, CONTEXT)],
    }
    for name, ranges in kinds.items():
        num_keys = step.set(ranges)
        require_same(step, graph, sum(stop - start for start, stop in ranges))
        times = [elapsed_us(graph.replay) for _ in range(NUM_RUNS + 3)][3:]
        yield figure(f"a graph of {NUM_LAYERS} layers and draws: {name}", times)
        if ranges[0] == full and CHUNK not in {stop - start for start, stop in ranges}:
            nbytes = num_keys * NUM_LAYERS * NUM_KEY_HEADS * 2 * DIM * 2
            yield figure("the same: keys and values", [nbytes / each / 1e6 for each in times], "TB/s", is_least=True)


def require_same(step: Step, graph: torch.cuda.CUDAGraph, num_tokens: int) -> None:
    """Refuse to time a graph that answers another thing than its calls do one by one."""
    outputs = []
    for run in (graph.replay, step.run):
        step.out.fill_(torch.nan)
        step.drawn.fill_(-9)
        run()
        outputs.append((step.out[:, :num_tokens].clone(), step.drawn.clone()))
    assert not outputs[0][0].isnan().any(), "some queries were not answered"
    assert all(map(torch.equal, *outputs)), "the graph answers something else"
