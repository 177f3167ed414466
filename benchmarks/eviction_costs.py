"""What eviction policies cost: ``python -m benchmarks.eviction_costs``, some minutes and the time to compile.

Processor time, the least of some rounds, with policies in turn: for each block of prompts of 8, 32 and 256 new blocks;
for the choice of a victim among 1,000 to 100,000 leaves, each of a run, a class and an age of its own; for the end of a
request after a pause so long that all bounds on its work are met; and bytes a block. Prompts are conversations that go
on or end, generated from a seed; that each policy hits no more than the optimum is checked before anything is timed.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.markdown import table
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.eviction.hazard.layout import (
    CURVES,
    LEAF,
    LEAF_CLASSES,
    LEAF_REFS,
    LEAF_TICKS,
    NUM_LEAVES,
    NUM_NODES,
    NUM_REFS,
    PASSED,
    PLACE,
    SWEEP,
    VALUE,
)
from pagedkv.blocks.eviction.hazard.policy import HAZARD, draw
from pagedkv.blocks.eviction.policy import note_request
from pagedkv.blocks.eviction.registry import POLICIES
from pagedkv.blocks.record import CLOCK_US, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.capacity.pool_hits import optimal_hits, serve_trace
from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.planner.traces.request import Request

ROUNDS: Final = 7
NUM_TRACE_REFS: Final = 400_000
NUM_DRAWS: Final = 20_000
NUM_ENDS: Final = 300
SHARE_GOING_ON: Final = 0.5
NUMS_OF_NEW_BLOCKS: Final = (8, 32, 256)
NUMS_OF_LEAVES: Final = (1_000, 10_000, 100_000)
SIZES: Final = (100_000, 131_073, 1_000_000)
LONG_PAUSE_US: Final = 10**12
SHOWN: Final = ("lru", "adaptive", "hazard")


def conversations(num_new_blocks: int, seed: int = 0) -> BlockReferences:
    """Make prompts that each add so many blocks to those of one before, or begin anew."""
    random = np.random.default_rng(seed)
    collector = ReferenceCollector("generated")
    going_on: list[list[int]] = []
    num_ids = num_refs = 0
    now_s = 0.0
    while num_refs < NUM_TRACE_REFS:
        now_s += random.exponential(1.0)
        known = going_on.pop(random.integers(len(going_on))) if going_on and random.random() < SHARE_GOING_ON else []
        prompt = [*known, *range(num_ids, num_ids + num_new_blocks)]
        num_ids += num_new_blocks
        num_refs += len(prompt)
        collector.add(Request(now_s, len(prompt), int(random.integers(1, 1000)), np.array(prompt, np.int64), 1))
        if random.random() < SHARE_GOING_ON:
            going_on.append(prompt)
    return collector.references()


def ns_a_block(references: BlockReferences) -> dict[str, float]:
    """Time a trace with each policy in turn; give the least of its rounds, for each block of a prompt."""
    capacity = references.num_unique_blocks // 20
    most = optimal_hits(references, capacity)
    least = dict.fromkeys(SHOWN, float("inf"))
    for _ in range(ROUNDS):
        for name in SHOWN:
            pool = BlockPool("served", capacity + 1, 1, policy=POLICIES[name])
            started_ns = time.process_time_ns()
            hits = serve_trace(pool, references)
            took_ns = time.process_time_ns() - started_ns
            assert hits.sum() <= most
            least[name] = min(least[name], took_ns / references.num_block_refs)
    return least


@compiled
def _draw_often(pool: PoolArrays, num_draws: int) -> int:
    chosen = 0
    for _ in range(num_draws):
        chosen += draw(pool, 0)
    return chosen


def us_a_victim(num_leaves: int) -> float:
    """Time a choice among so many leaves, of classes that each have a curve."""
    random = np.random.default_rng(0)
    arrays = BlockPool("drawn", num_leaves + 1, 1, policy=HAZARD).arrays
    leaves = np.arange(1, num_leaves + 1)
    marks = arrays.eviction_blocks
    marks[leaves, LEAF] = random.permutation(leaves)
    marks[marks[leaves, LEAF], PLACE] = leaves
    marks[leaves, LEAF_TICKS] = arrays.eviction[NUM_REFS] = 1_000_000
    marks[leaves, LEAF_TICKS] -= random.integers(0, 1_000_000, num_leaves)
    marks[leaves, LEAF_REFS] = marks[leaves, LEAF_TICKS]
    marks[leaves, LEAF_CLASSES] = random.choice([packed for packed in range(1 << 20) if _is_class(packed)], num_leaves)
    arrays.eviction[CURVES:PASSED] = np.arange(NUM_NODES)
    arrays.eviction_rates[:NUM_NODES, VALUE:] = random.random(arrays.eviction_rates[:NUM_NODES, VALUE:].shape)
    arrays.eviction[NUM_LEAVES] = num_leaves
    times = []
    for _ in range(ROUNDS):
        started_ns = time.process_time_ns()
        _draw_often(arrays, NUM_DRAWS)
        times.append((time.process_time_ns() - started_ns) / NUM_DRAWS)
    return min(times) / 1000


def _is_class(packed: int) -> bool:
    """Return whether a number is the classes of a run: both of its first features lie within their trees."""
    return (packed & 0x1FF) < 2 * 2 * 13 * 8 and (packed >> 9 & 0xFF) < 13 * 14


@compiled
def _end_request(pool: PoolArrays, blocks: Int32Array) -> None:
    note_request(pool, blocks, 0)


def us_of_bursts(references: BlockReferences) -> tuple[float, float]:
    """Time the end of a request without blocks after a long pause, in the midst of a sweep: median and 99 of 100."""
    served = BlockPool("served", references.num_unique_blocks // 20 + 1, 1, policy=HAZARD)
    serve_trace(served, references)
    pool = served.arrays
    arrays = cast("Sequence[npt.NDArray[np.generic]]", pool)
    kept = [array.copy() for array in arrays]
    times = []
    for _ in range(NUM_ENDS):
        for array, before in zip(arrays, kept, strict=True):
            np.copyto(array, before)
        pool.counts[CLOCK_US] += LONG_PAUSE_US
        pool.eviction[NUM_REFS] += 1 << 29
        pool.eviction[SWEEP] = NUM_NODES  # curves come next
        started_ns = time.perf_counter_ns()
        _end_request(pool, np.zeros(0, np.int32))
        times.append((time.perf_counter_ns() - started_ns) / 1000)
    return statistics.median(times), float(np.quantile(times, 0.99))


def main() -> None:
    """Print the table."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[list[object]] = [["", *SHOWN]]
    traces = {num_new: conversations(num_new) for num_new in NUMS_OF_NEW_BLOCKS}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(traces) + len(NUMS_OF_LEAVES) + 1)
        for num_new, references in traces.items():
            progress.update(task, description=f"prompts of {num_new} new blocks", advance=1)
            mean = references.num_block_refs / references.num_requests
            costs = ns_a_block(references)
            rows.append([f"ns a block, {num_new} new blocks of {mean:.0f}", *(f"{costs[name]:.0f}" for name in SHOWN)])
        for num_leaves in NUMS_OF_LEAVES:
            progress.update(task, description=f"{num_leaves:,} leaves", advance=1)
            rows.append([f"us a victim, {num_leaves:,} leaves", "", "", f"{us_a_victim(num_leaves):.2f}"])
        progress.update(task, description="bursts", advance=1)
        middle, late = us_of_bursts(traces[NUMS_OF_NEW_BLOCKS[0]])
        rows.append(["us of the end of a request with all work that is put off, median", "", "", f"{middle:.0f}"])
        rows.append(["the same, 99 of 100", "", "", f"{late:.0f}"])
    for num_blocks in SIZES:
        sizes = (BlockPool("sized", num_blocks, 16, policy=POLICIES[name]).nbytes / num_blocks for name in SHOWN)
        rows.append([f"bytes a block of {num_blocks:,}", *(f"{size:.0f}" for size in sizes)])
    print(table(*rows))


if __name__ == "__main__":
    main()
