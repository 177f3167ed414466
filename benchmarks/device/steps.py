"""Figures of block tables: a step on the GPU, and on the host; and the plain step on a CPU."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.device.plans import decode_plan, prefill_plan
from benchmarks.device.timing import Figure, elapsed_us, figure, on_host
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import BlockTables

__all__ = ["cpu_figures", "step_figures"]

NUM_ROWS = 1024
LENGTH = 131_072
BLOCK_SIZE = 16
NUM_PREFILLED = 8
BLOCKS_OF_PROMPT = 512
NUM_STEPS = 260
STEPS_A_GRAPH = 4  # as many as the ring has buffers


def config_of(num_groups: int) -> SpaceConfig:
    """Groups of one kind, in tables as wide as 131k tokens are long."""
    groups = tuple(FullAttention(BLOCK_SIZE) for _ in range(num_groups))
    return SpaceConfig(groups, num_blocks=1_000_000, max_sequences=NUM_ROWS, max_tokens=LENGTH + 1024)


def filled_tables(config: SpaceConfig, device: str) -> BlockTables:
    """Tables of a thousand rows of 131k tokens, as if their prompts had been prefilled."""
    tables = BlockTables(config, max_batched_tokens=65_536, device=device)
    generator = torch.Generator().manual_seed(1)
    for group in range(tables.num_groups):
        content = torch.randint(1, 1_000_000, tables.table(group).shape, dtype=torch.int32, generator=generator)
        tables.table(group).copy_(content)
    tables.arrays.extents.fill_(LENGTH // BLOCK_SIZE)
    return tables


def decode_plans(config: SpaceConfig, count: int) -> Iterator[StepPlan]:
    """Steps of a thousand rows, of which every sixteenth begins a block."""
    lengths = (LENGTH + np.arange(NUM_ROWS) % BLOCK_SIZE).astype(np.int32)
    for step in range(1, count + 1):
        yield decode_plan(config, step, lengths)
        lengths = lengths + np.int32(1)


def uneven_plans(config: SpaceConfig, count: int) -> Iterator[StepPlan]:
    """The same, but how many rows begin a block differs from step to step, so that no plan is laid out as the last."""
    lengths = (LENGTH + np.random.default_rng(1).integers(0, BLOCK_SIZE, NUM_ROWS)).astype(np.int32)
    for step in range(1, count + 1):
        yield decode_plan(config, step, lengths)
        lengths = lengths + np.int32(1)


def require_same_tables(config: SpaceConfig) -> None:
    """Prove that the GPU's tables are those of plain torch on the CPU, step by step."""
    fast, plain = filled_tables(config, "cuda"), filled_tables(config, "cpu")
    for plan in decode_plans(config, 3):
        inputs, expected = fast.step(plan), plain.step(plan)
        torch.cuda.synchronize()
        assert torch.equal(inputs.slot_mappings.cpu(), expected.slot_mappings)
        for mine, theirs in zip(inputs.block_tables, expected.block_tables, strict=True):
            assert torch.equal(mine.cpu(), theirs)


def step_figures() -> Iterator[Figure]:
    """Measure a step on the GPU and on the host."""
    for num_groups, bar in ((1, 8.0), (4, 12.0)):
        require_same_tables(config_of(num_groups))
        plans = list(decode_plans(config_of(num_groups), NUM_STEPS))
        groups = f"{num_groups} {'group' if num_groups == 1 else 'groups'}"
        yield from figures_of(plans, num_groups, f"decode step, 1,024 rows of 131k tokens, {groups}", (bar, 50.0))
        uneven = list(uneven_plans(config_of(num_groups), NUM_STEPS))
        yield from figures_of(uneven, num_groups, f"decode step, plans of uneven sizes, {groups}", (None, None))
    config = config_of(4)
    plans = [prefill_plan(config, step, NUM_PREFILLED, BLOCKS_OF_PROMPT) for step in range(1, NUM_STEPS + 1)]
    yield from figures_of(plans, 4, "prefill step, 8 rows of 512 new blocks, 4 groups", (14.0, 100.0))


def figures_of(
    plans: list[StepPlan], num_groups: int, name: str, bars: tuple[float | None, float | None]
) -> Iterator[Figure]:
    """Measure some steps on the GPU, by graphs, and further ones on the host."""
    tables = filled_tables(config_of(num_groups), "cuda")
    tables.step(plans[0])
    yield figure(f"{name}: GPU", replayed(tables, plans[1:161]), bar=bars[0])
    rest = iter(plans[161:])
    yield figure(f"{name}: host", on_host(lambda: tables.step(next(rest)), 80), bar=bars[1])


def replayed(tables: BlockTables, plans: list[StepPlan]) -> list[float]:
    """Time steps in a graph of four, each with a plan of its own in the ring."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS_A_GRAPH):
            tables.launch()
    times = []
    for first in range(0, len(plans) - STEPS_A_GRAPH + 1, STEPS_A_GRAPH):
        for plan in plans[first : first + STEPS_A_GRAPH]:
            tables.stage(plan)
            tables.fence()
        times.append(elapsed_us(graph.replay) / STEPS_A_GRAPH)
    return times[3:]


def cpu_figures() -> Iterator[Figure]:
    """Measure the plain step on a CPU."""
    config = config_of(1)
    tables = filled_tables(config, "cpu")
    plans = iter(list(decode_plans(config, 120)))
    tables.step(next(plans))
    yield figure(
        "decode step in plain torch on the CPU, 1 group", on_host(lambda: tables.step(next(plans)), 100), bar=1000.0
    )
