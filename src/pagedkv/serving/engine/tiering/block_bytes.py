"""Bytes of blocks between device memory and the host, for tiers: what both kinds of devices offer, and that of a CPU.

:mod:`~pagedkv.serving.engine.tiering.gpu_block_bytes` has that of a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.device import CopyTicket, KVStorage

__all__ = ["BlockBytes", "CpuBlockBytes", "HostBlocks", "Rows", "block_nbytes", "fill"]

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


class BlockBytes(Protocol):
    """Copies of blocks of one storage, group by group.

    Attributes:
        read_nbytes_a_step, read_nbytes_a_second: bytes that may be read in a step, and for each second that it takes.
        filled_nbytes_a_step: bytes that may be written into blocks in a step while requests run; None: any number.
        filled_nbytes_at_once: bytes of one call.
    """

    read_nbytes_a_step: int
    read_nbytes_a_second: int
    filled_nbytes_a_step: int | None
    filled_nbytes_at_once: int

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group."""

    @property
    def room_nbytes(self) -> int | None:
        """Bytes that can be read now; None: any number."""

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Begin to copy blocks to the host, behind the steps that were launched; None: no room there now."""

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyTicket:
        """Begin to copy rows into blocks, behind the steps that were launched.

        Args:
            group: whose blocks; block_ids: int32 ``[n]``.
            rows: arrays of ``[any, block_nbytes]``, ``n`` rows in all. Their memory must not change afterwards.
        """

    def let_steps_wait(self, ticket: CopyTicket) -> None:
        """Let all steps from now on see what was copied, and overwrite it, without a wait on the host."""

    def close(self) -> None:
        """Wait for all copies."""


@final
class CpuBlockBytes:
    """Copies on a CPU, which have ended when the call returns. See :class:`BlockBytes`.

    Args:
        storage: its pools are block-major, as the engine's are.
    """

    read_nbytes_a_step = 32 * 2**20
    read_nbytes_a_second = 2**30
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

    def let_steps_wait(self, ticket: CopyTicket) -> None:
        """Do nothing: the copies have ended."""

    def close(self) -> None:
        """Do nothing: the copies have ended."""

    def _blocks(self, group: int) -> Rows:
        pool = self._pools[group]
        return pool.device_bytes.view(pool.num_blocks, pool.block_nbytes).numpy()


def block_nbytes(storage: KVStorage) -> list[int]:
    """Return the bytes of a block of each group."""
    return [storage.pool_of(group).block_nbytes for group in range(len(storage.shapes))]


def fill(
    block_bytes: BlockBytes, entries: Sequence[tuple[Sequence[Int32Array], Sequence[memoryview]]]
) -> list[CopyTicket] | None:
    """Begin to copy the parts of entries into blocks; None, with an unknown number of blocks filled: parts are short.

    Args:
        block_bytes: copies.
        entries: for each, by group, the blocks to be filled, and the part whose last rows fill them.
    """
    tickets = []
    for group, nbytes in enumerate(block_bytes.nbytes):
        ids: list[Int32Array] = [NO_BLOCKS]
        rows: list[Rows] = []
        for blocks, parts in entries:
            if parts[group].nbytes % nbytes or parts[group].nbytes < len(blocks[group]) * nbytes:
                return None
            if len(blocks[group]):
                content = np.asarray(parts[group]).reshape(-1, nbytes)
                ids.append(blocks[group])
                rows.append(content[len(content) - len(blocks[group]) :])
        if rows:
            tickets.append(block_bytes.write(group, np.concatenate(ids), rows))
    return tickets
