"""BlockBytes: copies of blocks between a device and the host, for tiers. Implemented for each device.

An engine copies bytes. A simulation implements the same without bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array

__all__ = ["BlockBytes", "CopyEnd", "HostBlocks", "Rows", "fill"]

Rows: TypeAlias = npt.NDArray[np.uint8]

NO_BLOCKS: Final = np.zeros(0, np.int32)


class CopyEnd(Protocol):
    """The end of copies under way."""

    @property
    def event(self) -> Any | None:  # noqa: ANN401 - a device's
        """The device's event after the copies; None if they have ended already."""

    def is_done(self) -> bool:
        """Return whether the copies have ended, without waiting."""

    def wait(self) -> None:
        """Wait on the host until they have ended."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """A copy of blocks to the host, under way.

    Args:
        rows: uint8 ``[blocks, block_nbytes]`` in host memory; valid once the ticket is done.
        ticket: the end of the copy.
    """

    rows: Rows
    ticket: CopyEnd


class BlockBytes(Protocol):
    """Copies of blocks of one storage, group by group.

    Attributes:
        read_nbytes_a_step, read_nbytes_a_second: bytes that may be read in a step, and for each second that it takes.
        read_nbytes_at_once: bytes of one copy, but for one entry; a GPU gathers blocks in its memory for it.
        filled_nbytes_a_step: bytes that may be written into blocks in a step while requests run; None: any number.
        filled_nbytes_at_once: bytes of one call.
    """

    read_nbytes_a_step: int
    read_nbytes_a_second: int
    read_nbytes_at_once: int
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

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyEnd:
        """Begin to copy rows into blocks, behind the steps that were launched.

        Args:
            group: whose blocks; block_ids: int32 ``[n]``.
            rows: arrays of ``[any, block_nbytes]``, ``n`` rows in all. Their memory must not change afterwards.
        """

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Order all steps launched from now on behind a copy, on the device and without a wait on the host."""

    def close(self) -> None:
        """Wait for all copies."""


def fill(
    block_bytes: BlockBytes, entries: Sequence[tuple[Sequence[Int32Array], Sequence[memoryview]]]
) -> list[CopyEnd] | None:
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
