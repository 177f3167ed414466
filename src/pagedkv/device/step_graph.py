"""StepGraph: launches a step's kernels on a GPU, one by one during a capture, else by replay of a CUDA graph."""

from types import ModuleType
from typing import final

import torch

from pagedkv.device.table_arrays import TableArrays, TableGeometry, make_arrays

__all__ = ["StepGraph"]


@final
class StepGraph:
    """Executes the next packet of the ring.

    Addresses are fixed and sizes are read from memory, so the graph is captured once, at the first launch.

    Args:
        kernels: the module of the kernels.
        sizes: sizes of the tables.
        arrays: arrays of the kernels.
        device: the device.
    """

    def __init__(self, kernels: ModuleType, sizes: TableGeometry, arrays: TableArrays, device: torch.device) -> None:
        self._kernels = kernels
        self._sizes = sizes
        self._arrays = arrays
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the current stream is being captured, so that launched kernels are recorded instead of executed."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def run(self) -> None:
        """Launch the kernels one by one."""
        self._kernels.pull_packet(self._arrays)
        self._kernels.step_tables(self._arrays)

    def replay(self) -> None:
        """Launch all kernels by the graph; on a CPU one by one."""
        if self._device.type != "cuda":
            self.run()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self._device):
            self._compile()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
        return graph

    def _compile(self) -> None:
        """Run the kernels once on scratch tables with an empty packet, since they must not compile in a capture."""
        scratch = make_arrays(self._sizes, self._device)
        scratch.ring[0, : len(self._sizes.layout.template)] = torch.from_numpy(self._sizes.layout.template)
        self._kernels.pull_packet(scratch)
        self._kernels.step_tables(scratch)
        torch.cuda.synchronize(self._device)
