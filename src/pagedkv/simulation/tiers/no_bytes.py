"""NoBytes: copies of blocks without content. One byte represents a block."""

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.tiers.entry_blocks import CopyEnd, HostBlocks, Rows

__all__ = ["NoBytes"]

UNLIMITED: Final = 2**62


@final
class Ended:
    """The end of copies, which take no time of their own: only the medium takes time."""

    event = None

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


@final
class NoBytes:
    """Copies that move nothing. See :class:`~pagedkv.tiers.entry_blocks.BlockBytes`.

    A step may read any number of bytes, since the queue of a store limits them. Groups have no bytes to be filled.
    """

    read_nbytes_a_step = UNLIMITED
    read_nbytes_a_second = 0
    read_nbytes_at_once = UNLIMITED
    filled_nbytes_a_step: int | None = None
    filled_nbytes_at_once = UNLIMITED
    nbytes: Sequence[int] = ()
    room_nbytes: int | None = None

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Return a byte for each block."""
        del group
        return HostBlocks(np.zeros((len(block_ids), 1), np.uint8), Ended())

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyEnd:
        """Do nothing."""
        del group, block_ids, rows
        return Ended()

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
