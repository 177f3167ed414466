"""Bytes of blocks between the memory of a CPU and the host, for tiers, and the bytes of a block.

:mod:`~pagedkv.engine.tiering.gpu_block_bytes` has the copies of a GPU.
"""

from collections.abc import Sequence
from typing import final

from pagedkv.contract.arrays import Int32Array
from pagedkv.device import CopyTicket, KVStorage
from pagedkv.tiering import CopyEnd, HostBlocks, Rows

__all__ = ["CpuBlockBytes", "block_nbytes"]


@final
class CpuBlockBytes:
    """Copies on a CPU, which have ended when the call returns, as :class:`~pagedkv.tiering.BlockBytes` has them.

    Args:
        storage: its pools are block-major, as the engine's are.
    """

    read_nbytes_a_step = 32 * 2**20
    read_nbytes_a_second = 2**30
    read_nbytes_at_once = 64 * 2**20
    filled_nbytes_a_step: int | None = 64 * 2**20
    filled_nbytes_at_once = 16 * 2**20

    def __init__(self, storage: KVStorage) -> None:
        pools = [storage.pool_of(group) for group in range(len(storage.shapes))]
        assert all(pool.pieces.is_block_major for pool in pools), "blocks of the engine are contiguous"
        self._pools = pools
        self.nbytes: Sequence[int] = block_nbytes(storage)
        self.room_nbytes: int | None = None

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Copy blocks to the host."""
        return HostBlocks(self._blocks(group)[block_ids], CopyTicket("blocks for a tier", None))

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyTicket:
        """Copy rows into blocks."""
        blocks, begin = self._blocks(group), 0
        for own in rows:
            blocks[block_ids[begin : begin + len(own)]] = own
            begin += len(own)
        return CopyTicket("blocks of a tier", None)

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Do nothing: the copies have ended."""

    def close(self) -> None:
        """Do nothing: the copies have ended."""

    def _blocks(self, group: int) -> Rows:
        pool = self._pools[group]
        return pool.device_bytes.view(pool.num_blocks, pool.block_nbytes).numpy()


def block_nbytes(storage: KVStorage) -> list[int]:
    """Return the bytes of a block of each group."""
    return [storage.pool_of(group).block_nbytes for group in range(len(storage.shapes))]
