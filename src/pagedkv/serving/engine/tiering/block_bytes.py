"""Bytes of blocks between device memory and the host, for tiers. Plain torch, on a CPU and on a GPU alike.

On a GPU all copies are in the current stream, behind the steps that were launched before. So a block that is read has
its content, and a block that is overwritten is not read any more, without a wait on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.device import CopyTicket, KVStorage

__all__ = ["BlockBytes", "HostBlocks", "fill"]

Rows: TypeAlias = npt.NDArray[np.uint8]

NO_BLOCKS: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """A copy of blocks that was begun.

    Args:
        rows: uint8 ``[blocks, block_nbytes]`` in host memory; valid once the ticket is done.
        ticket: tells when.
    """

    rows: Rows
    ticket: CopyTicket


@final
class BlockBytes:
    """Copies blocks of one storage, group by group.

    Args:
        storage: its pools are block-major, as the engine's are.
    """

    def __init__(self, storage: KVStorage) -> None:
        pools = [storage.pool_of(group) for group in range(len(storage.shapes))]
        assert all(pool.pieces.is_block_major for pool in pools), "blocks of the engine are contiguous"
        self._device = storage.device
        self._is_gpu = storage.device.type == "cuda"
        self._pools = pools
        self.nbytes = [pool.block_nbytes for pool in pools]

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks:
        """Begin to copy blocks to the host."""
        blocks = self._blocks(group).index_select(0, self._ids(block_ids))
        if not self._is_gpu:
            return HostBlocks(blocks.numpy(), CopyTicket("blocks for a tier", None))
        rows = torch.empty(blocks.shape, dtype=torch.uint8, pin_memory=True)
        rows.copy_(blocks, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return HostBlocks(rows.numpy(), CopyTicket("blocks for a tier", event))

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> None:
        """Copy rows of ``block_nbytes`` bytes each into blocks. The rows are not read after the call."""
        if not self._is_gpu:
            blocks = self._blocks(group).numpy()
            for block, row in zip(block_ids.tolist(), rows, strict=True):
                blocks[block] = row
            return
        staged = torch.empty(len(rows), self.nbytes[group], dtype=torch.uint8, pin_memory=True)
        view = staged.numpy()
        for place, row in enumerate(rows):
            view[place] = row
        self._blocks(group).index_copy_(0, self._ids(block_ids), staged.to(self._device, non_blocking=True))

    def _blocks(self, group: int) -> torch.Tensor:
        pool = self._pools[group]
        return pool.device_bytes.view(pool.num_blocks, pool.block_nbytes)

    def _ids(self, block_ids: Int32Array) -> torch.Tensor:
        return torch.from_numpy(block_ids.astype(np.int64)).to(self._device)


def fill(block_bytes: BlockBytes, entries: Sequence[tuple[Sequence[Int32Array], Sequence[memoryview]]]) -> bool:
    """Copy the parts of entries into blocks; return False, with an unknown number of blocks filled, if parts are short.

    Args:
        block_bytes: copies.
        entries: for each, by group, the blocks to be filled, and the part whose last rows fill them.
    """
    for group, nbytes in enumerate(block_bytes.nbytes):
        ids: list[Int32Array] = [NO_BLOCKS]
        rows: list[Rows] = []
        for blocks, parts in entries:
            if parts[group].nbytes % nbytes or parts[group].nbytes < len(blocks[group]) * nbytes:
                return False
            content = np.frombuffer(parts[group], np.uint8).reshape(-1, nbytes)
            ids.append(blocks[group])
            rows += list(content[len(content) - len(blocks[group]) :])
        if rows:
            block_bytes.write(group, np.concatenate(ids), rows)
    return True
