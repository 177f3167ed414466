"""The part of :class:`~pagedkv.BlockSpace` that swaps rows out to the host pools and back in."""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

import numpy.typing as npt

from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import Rows, as_batch, as_count
from pagedkv.contract.plan import BlockMoves
from pagedkv.contract.spec import AllocStatus
from pagedkv.errors import NoHostPoolError
from pagedkv.space import swapping
from pagedkv.space.batches import has_unknown, require_known, require_status
from pagedkv.space.content_space import ContentSpace
from pagedkv.tables.rows import RUNNING, SWAPPED

__all__ = ["SwapSpace"]


class SwapSpace(ContentSpace):
    """Operations that move rows between the device and the host."""

    def can_swap_out(self, rows: Rows) -> AllocStatus:
        """Return whether the host pools can take these rows. Changes nothing.

        OK if :meth:`swap_out` would succeed. NEVER without a host pool, or if the rows fit neither into an empty host
        pool nor into one that holds nothing but blocks which they share there. LATER also while the open plan copies or
        swaps into their blocks, while a step that replays a window of theirs is not acknowledged, and until their
        unknown tokens are filled in.
        """
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        status = swapping.swap_out_status(self._state, self._ledger, batch)
        return AllocStatus.LATER if status is AllocStatus.OK and has_unknown(self._state, batch) else status

    def swap_out(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Move rows to the host pools, device block -> host block; a block that several of these rows share moves once.

        The moves are in the open step's plan as well; the device blocks are freed when it is acknowledged.

        Raises:
            NoHostPoolError: a group's pool has no host pool.
            SequenceError: the open plan writes their blocks, a window is being replayed, or tokens are unknown
                (``can_swap_out`` returns LATER).
        """
        batch = as_batch(rows)
        mark = require_status(self._state, batch, RUNNING)
        require_known(self._state, batch, "swapped out")
        self._state.version += 1
        return swapping.swap_out(self._state, self._ledger, batch, mark)

    def can_swap_in(self, rows: Rows, counts: npt.ArrayLike | None = None, *, num_lookahead: int = 0) -> AllocStatus:
        """Return whether the device pools can take swapped-out rows back and let them continue. Changes nothing.

        Args:
            rows: the rows.
            counts: int32 ``[len(rows)]``, tokens that each row gets next; None: one each (none at ``max_tokens``).
                Blocks for these tokens, and for the copies on write that they cause, are counted.
            num_lookahead: slots a row beyond these tokens.

        OK if all fits and the watermark stays free; NEVER if it fits neither into empty pools nor into pools that hold
        nothing but blocks which the rows share there.
        """
        self._require_host_pools()
        batch = as_batch(rows)
        require_status(self._state, batch, SWAPPED)
        reserve = as_count(num_lookahead, "num_lookahead")
        growth = swapping.as_next_counts(self._state, batch, counts, reserve)
        return swapping.swap_in_status(self._state, batch, growth, reserve)

    def swap_in(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Move swapped-out rows back: host block -> device block. The open step may compute them at once."""
        self._require_host_pools()
        batch = as_batch(rows)
        require_status(self._state, batch, SWAPPED)
        self._state.version += 1
        return swapping.swap_in(self._state, self._ledger, batch)

    def _require_host_pools(self) -> None:
        if not self._state.host_pools:
            raise NoHostPoolError("no host pool is configured: set num_host_blocks")
