"""A device for one group of full attention: memory that obeys plans, and shows what a sequence would attend to."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv import BlockMoves, SpaceConfig, StepPlan

__all__ = ["Device"]

UNDEFINED: Final = -1


class Device:
    """Slots that hold tokens, standing for their keys and values; each read is compared with the sequence."""

    def __init__(self, config: SpaceConfig) -> None:
        """Make memory in which nothing is defined."""
        (group,) = config.groups
        (num_blocks,), (num_host_blocks,) = config.blocks_by_pool().values(), config.host_blocks_by_pool().values()
        self._block_size = group.block_size
        self._memory = np.full((num_blocks, group.block_size), UNDEFINED)
        self._host_memory = np.full((num_host_blocks, group.block_size), UNDEFINED)
        self._table = np.zeros((config.max_sequences, config.max_tokens), np.int32)

    def run(self, plan: StepPlan, tokens: Mapping[int, list[int]]) -> None:
        """Carry a plan out for rows with these tokens, and see that each that is computed reads its own."""
        _move(plan.swaps_out, self._memory, self._host_memory)
        _move(plan.swaps_in, self._host_memory, self._memory)
        _move(plan.copies, self._memory, self._memory)
        for writes in plan.table_writes:
            runs = np.split(writes.block_ids, np.cumsum(writes.counts)[:-1])
            for row, start, run in zip(writes.rows, writes.starts, runs, strict=True):
                self._table[row, start : start + len(run)] = run
        compute = plan.compute
        ranges = list(zip(compute.rows.tolist(), compute.starts.tolist(), compute.ends.tolist(), strict=True))
        for row, start, end in ranges:
            self._memory[self._slots(row, start, end)] = tokens[row][start:end]
        for row, _, end in ranges:
            assert self.read(row, end) == tokens[row][:end]

    def read(self, row: int, length: int) -> list[int]:
        """Read a row through the device's own table."""
        read: list[int] = self._memory[self._slots(row, 0, length)].tolist()
        return read

    def _slots(self, row: int, start: int, end: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        where = np.arange(start, end)
        return self._table[row, where // self._block_size], where % self._block_size


def _move(moves: tuple[BlockMoves, ...], source: npt.NDArray[np.int64], destination: npt.NDArray[np.int64]) -> None:
    for move in moves:
        destination[move.dst_ids] = source[move.src_ids]
