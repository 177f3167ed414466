"""Figures of recurrent states: what is read out of blocks for a step's rows, and written back, a second."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from benchmarks.device.timing import Figure, by_graph, figure
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import RecurrentState
from pagedkv.device import KVStorage, StateShape, StateTensor, Transfers

__all__ = ["state_figures"]

NUM_RUNS: Final = 20
NUM_ROWS: Final = 64
NUM_LAYERS: Final = 24
SHAPE: Final = StateShape(
    NUM_LAYERS,
    (StateTensor("convolution_0", (6144, 4), torch.bfloat16), StateTensor("scan_0", (64, 64, 128), torch.float32)),
)


def state_figures() -> Iterator[Figure]:
    """Read the states of 64 rows, all layers by two kernels, and write them layer by layer: 2.1 MiB each."""
    storage = KVStorage(SpaceConfig((RecurrentState(1024),), 2 * NUM_ROWS + 1), [SHAPE], "cuda")
    storage.pool_of(0).device_bytes.random_(0, 120)
    transfers = Transfers(storage)
    order = torch.randperm(2 * NUM_ROWS, generator=torch.Generator().manual_seed(1))[:NUM_ROWS]
    blocks = (1 + order).int().cuda()
    states = transfers.gather_states_of_layers(0, blocks)
    for layer, state in enumerate(states):
        kept = storage.states(0, layer)
        assert all(torch.equal(state[name], kept[name][blocks.long()]) for name in kept)
    nbytes = 2 * NUM_ROWS * sum(tensor.nbytes for tensor in SHAPE.tensors)

    def rates(times: list[float], num_layers: int) -> list[float]:
        return [nbytes * num_layers / each / 1e6 for each in times]

    name = f"states of {NUM_ROWS} rows, {NUM_LAYERS} layers"
    times = by_graph([partial(transfers.gather_states_of_layers, 0, blocks)], NUM_RUNS)
    yield figure(f"{name}, read: bytes read and written", rates(times, NUM_LAYERS), "TB/s", is_least=True)
    writes = [partial(transfers.scatter_states, 0, layer, blocks, state) for layer, state in enumerate(states)]
    yield figure(f"{name}, written: likewise", rates(by_graph(writes, NUM_RUNS), 1), "TB/s", is_least=True)
    storage.close()
