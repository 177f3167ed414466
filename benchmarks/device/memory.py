"""Figures of memory that is given back and taken again: how long an engine takes to wake."""

import time
from collections.abc import Iterator
from typing import Final

import torch

from benchmarks.device.timing import Figure, figure
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import KeyValueShape, KVStorage

__all__ = ["memory_figures"]

WANTED_GIB: Final = 64
NUM_RUNS: Final = 5


def memory_figures() -> Iterator[Figure]:
    """Put a pool of 64 GiB to sleep and wake it; a graph that was captured before must do what it did."""
    shape = KeyValueShape(32, 8, 128, dtype=torch.bfloat16)
    free, _ = torch.cuda.mem_get_info()
    gib = min(WANTED_GIB, int(free * 0.95) // 2**30)
    config = SpaceConfig((FullAttention(16),), gib * 2**30 // shape.block_nbytes(16))
    storage = KVStorage(config, [shape], "cuda")
    keys = storage.keys(0, 31)
    address, found = keys.data_ptr(), torch.zeros_like(keys[-1])
    found.copy_(keys[-1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.copy_(keys[-1])
    asleep, awake = [], []
    for run in range(NUM_RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        storage.sleep()
        middle = time.perf_counter()
        storage.wake()
        torch.cuda.synchronize()
        end = time.perf_counter()
        asleep.append(middle - begin)
        awake.append(end - middle)
        keys[-1] = run
        graph.replay()
        assert storage.keys(0, 31).data_ptr() == address, "it woke elsewhere"
        assert bool((found == run).all()), "the graph read something else"
    yield figure(f"pool of {gib} GiB put to sleep", asleep, "s")
    yield figure(f"pool of {gib} GiB woken where it was", awake, "s", bar=0.5)
    storage.close()
