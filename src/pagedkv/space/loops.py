"""The loops of one space that run every step, specialized to the types of its arrays.

What they do is said where they are written, in :mod:`pagedkv.core`; here they only lose the cost of finding
out the types of a dozen arrays on every call (see :func:`~pagedkv.core.compiled.specialize`).
"""

import numpy as np

from pagedkv.core.blocks import Int32Array, PoolArrays, Uint32Array
from pagedkv.core.compiled import specialize
from pagedkv.core.digests import digest_new_blocks
from pagedkv.core.extra_keys import ExtraKeyArrays
from pagedkv.core.matching import match_chain
from pagedkv.core.pool import reuse_all, settle
from pagedkv.core.publishing import publish_new_blocks
from pagedkv.core.rows import GroupArrays
from pagedkv.core.sharing import last_pending_step
from pagedkv.core.tables import clear_rows, count_growth, first_unfit_growth, first_unfit_row, grow, release_rows, seat

__all__ = ["SpaceLoops"]


class SpaceLoops:
    """Machine code for arrays of the types that a space has. Callers pass contiguous arrays of the given dtypes."""

    def __init__(self, pool: PoolArrays, group: GroupArrays, rows: Int32Array, extra_keys: ExtraKeyArrays) -> None:
        """Compile the loops, or load them from disk."""
        ids = np.zeros(0, np.int32)
        pairs = np.zeros((0, 2), np.int32)
        words: Uint32Array = np.zeros((0, 8), np.uint32)
        self.match_chain = specialize(match_chain, pool, group, ids, ids, extra_keys, words, ids)
        self.reuse_all = specialize(reuse_all, pool, ids)
        self.last_pending_step = specialize(last_pending_step, pool, ids)
        self.seat = specialize(seat, pool, group, rows, 0, ids, ids, 0)
        self.digest_new_blocks = specialize(digest_new_blocks, pool, group, rows, ids, words, extra_keys)
        self.publish_new_blocks = specialize(publish_new_blocks, pool, group, rows, ids, pairs)
        self.first_unfit_row = specialize(first_unfit_row, rows, ids, 0, 0)
        self.first_unfit_growth = specialize(first_unfit_growth, rows, ids, ids, 0, 0, 0)
        self.count_growth = specialize(count_growth, pool, group, rows, ids, ids, 0)
        self.grow = specialize(grow, pool, group, rows, ids, ids, ids, 0, pairs, 0, 0)
        self.release_rows = specialize(release_rows, pool, group, rows, ids)
        self.clear_rows = specialize(clear_rows, rows, ids, 0)
        self.settle = specialize(settle, pool, 0)
