"""Bytes of whole blocks of an engine on several ranks, for tiers: gathered at rank 0, and sent out from there.

::

    read    rank 0: "send blocks 4, 7" --> the other ranks copy them to the host, and send them
            rank 0 puts the heads of all ranks together                                          --> a tier
    write   a tier --> rank 0 cuts whole blocks by heads, and sends each rank its own            --> blocks of each rank

The other ranks do this between two steps, in the order in which rank 0 sends it, so blocks have the content of the same
step on all ranks. The messages are those of :class:`~pagedkv.engine.ranks.rank_group.RankGroup`.
"""

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.device import CopyTicket, KVStorage
from pagedkv.engine.ranks.rank_group import RankGroup, SentCopy
from pagedkv.engine.ranks.whole_blocks import WholeBlocks
from pagedkv.engine.tiering import block_bytes_with_staging
from pagedkv.errors import RankLostError
from pagedkv.tiers.entry_blocks import BlockBytes, CopyEnd, HostBlocks, Rows

__all__ = ["OtherRankBlocks", "RankedBlockBytes"]

STAGED_NBYTES: Final = 2**28
"""Staging memory of a rank other than the first, on a GPU."""


@final
class RankedBlockBytes:
    """Copies of whole blocks, for rank 0. See :class:`~pagedkv.tiers.entry_blocks.BlockBytes`.

    A read returns when all ranks have sent their heads. After the loops of the other ranks have ended, nothing is read.

    Args:
        ranks: the group; groups: the whole blocks of each group; own: copies of this rank's blocks.
    """

    def __init__(self, ranks: RankGroup, groups: Sequence[WholeBlocks], own: BlockBytes) -> None:
        self._ranks = ranks
        self._lifetime = ranks.lifetime
        self._groups = groups
        self._own = own
        self.read_nbytes_a_step = own.read_nbytes_a_step
        self.read_nbytes_a_second = own.read_nbytes_a_second
        self.read_nbytes_at_once = own.read_nbytes_at_once
        self.filled_nbytes_a_step = own.filled_nbytes_a_step
        self.filled_nbytes_at_once = own.filled_nbytes_at_once
        self.nbytes: Sequence[int] = [each.nbytes for each in groups]

    @property
    def room_nbytes(self) -> int | None:
        """Bytes that can be read now: no fewer of this rank's own blocks."""
        return self._own.room_nbytes

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Copy whole blocks to the host; None: no room there now, or the other ranks have ended."""
        if self._ranks.lifetime != self._lifetime:
            return None
        whole = self._groups[group]
        rows = np.empty((len(block_ids), whole.nbytes), np.uint8)
        if len(block_ids):
            own = self._own.read(group, block_ids) if 0 in whole.sources else None
            if own is None and 0 in whole.sources:
                return None
            others = [rank for rank in whole.sources if rank]
            if others:
                self._ranks.send_copy(SentCopy(group, block_ids, tuple(others), is_write=False))
            for rank in others:
                received = self._ranks.receive_rows(rank, (len(block_ids), whole.rank_nbytes))
                whole.put(rows, rank, received)
            if own is not None:
                own.ticket.wait()
                whole.put(rows, 0, own.rows)
        return HostBlocks(rows, CopyTicket("blocks of all ranks", None))

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyEnd:
        """Send each rank its heads of whole blocks, and begin to copy this rank's own. Raises RankLostError."""
        if self._ranks.lifetime != self._lifetime:
            raise RankLostError("blocks cannot be written: the loops of the other ranks have ended")
        whole, content = self._groups[group], np.concatenate(rows)
        if self._ranks.size > 1:
            others = tuple(range(1, self._ranks.size))
            self._ranks.send_copy(SentCopy(group, block_ids, others, is_write=True))
            for rank in others:
                self._ranks.send_rows(rank, whole.cut(content, rank))
        return self._own.write(group, block_ids, [whole.cut(content, 0)])

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Order this rank's steps behind a copy. Other ranks have done so when they began theirs."""
        self._own.order_steps_behind(ticket)

    def close(self) -> None:
        """Wait for this rank's copies."""
        self._own.close()


@final
class OtherRankBlocks:
    """Copies of the blocks of a rank other than the first, as rank 0 asks for them.

    Args:
        ranks: the group; storage: of this rank.
    """

    def __init__(self, ranks: RankGroup, storage: KVStorage) -> None:
        self._ranks = ranks
        self._storage = storage
        self._opened: BlockBytes | None = None

    def copy(self, sent: SentCopy) -> None:
        """Send blocks to rank 0, or receive blocks from it. Raises RankLostError."""
        if self._ranks.rank not in sent.ranks:
            return
        if self._opened is None:
            largest = max(self._storage.pool_of(group).block_nbytes for group in range(len(self._storage.shapes)))
            self._opened = block_bytes_with_staging(self._storage, max(STAGED_NBYTES, 2 * largest))
        if sent.is_write:
            shape = (len(sent.block_ids), self._opened.nbytes[sent.group])
            rows = self._ranks.receive_rows(0, shape)
            self._opened.order_steps_behind(self._opened.write(sent.group, sent.block_ids, [rows]))
        else:
            self._ranks.send_rows(0, _read(self._opened, sent.group, sent.block_ids))


def _read(block_bytes: BlockBytes, group: int, block_ids: Int32Array) -> Rows:
    """Copy blocks to the host, and wait for it; as many at a time as staging memory has room for."""
    nbytes = block_bytes.nbytes[group]
    rows = np.empty((len(block_ids), nbytes), np.uint8)
    at_once = max(1, STAGED_NBYTES // 2 // nbytes)
    for begin in range(0, len(block_ids), at_once):
        copied = block_bytes.read(group, block_ids[begin : begin + at_once])
        assert copied is not None, "the staging memory has room for them"
        copied.ticket.wait()
        rows[begin : begin + at_once] = copied.rows
    return rows
